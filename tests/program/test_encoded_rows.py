"""Guides that encode each row: exact where the encoder can be, and nothing of a row is sent."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import hierfl
from hierfl import ClientBatch, methods
from hierfl.optimizers import Adam

WEIGHT, NOISE = 1.5, 0.8
POSITIVE = dist.constraints.positive


def clients(counts: tuple[int, ...]) -> hierfl.ClientData:
    g = torch.Generator().manual_seed(0)
    client = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    own = torch.randn(len(counts), generator=g)[client]
    y = own + (WEIGHT**2 + NOISE**2) ** 0.5 * torch.randn(len(client), generator=g)
    return hierfl.ClientData.from_arrays([f"c{k}" for k in client.tolist()], y=y)


def model(batch: ClientBatch) -> None:
    with batch.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        with batch.data():
            code = pyro.sample("code", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(own + WEIGHT * code, NOISE), obs=batch.y)


def guide(batch: ClientBatch) -> None:
    """The encoder can be exact: Normal(slope (y - own), scale)."""
    slope = pyro.param("slope", torch.tensor(0.0))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=POSITIVE)
    count = batch.num_clients
    with batch.clients():
        loc = pyro.param("loc", torch.zeros(count, 1))
        spread = pyro.param("spread", torch.ones(count, 1), constraint=POSITIVE)
        own = pyro.sample("own", dist.Normal(loc, spread))
        with batch.data():
            pyro.sample("code", dist.Normal(slope * (batch.y - own), scale))


@pytest.mark.slow("None-120")
@pytest.mark.parametrize(("batch_size", "rounds"), [(None, 120), (10, 40)])
def test_a_linear_encoder_is_exact(batch_size: int | None, rounds: int) -> None:
    data = clients((30, 20, 12))
    how: Any = {
        "draws": 4,
        "batch_size": batch_size,
        "optimizer": Adam(0.1),
        "local_optimizer": Adam(0.1),
    }
    fit = hierfl.fit(methods.fedsvi(model, guide, **how), data, rounds=rounds, seed=0)
    shared = fit.progress.server.at.params
    total = WEIGHT**2 + NOISE**2
    near = 0.05 if batch_size is None else 0.12  # the gradients of mini-batches are noisy
    assert shared["slope"] == pytest.approx(WEIGHT / total, abs=near)
    assert shared["scale"].exp() == pytest.approx(NOISE / total**0.5, abs=near)
    if batch_size is not None:
        return
    own = fit.draws(2000).own["own"].squeeze()
    precision = 1.0 + data.counts / total
    sums = torch.stack([y.sum() for y in data.fields["y"].split(data.counts.tolist())])
    assert torch.allclose(own.mean(0), sums / total / precision, atol=0.1)
    assert torch.allclose(own.std(0) * precision.sqrt(), torch.ones(3), atol=0.15)
    assert set(fit.program.latents.local_block.unflatten(torch.zeros(1, 1, 1))[0]) == {"own"}


def autoencoder() -> tuple[Any, Any]:
    encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def styled(batch: ClientBatch) -> None:
        pyro.module("decoder", decoder)
        with batch.clients():
            style = pyro.sample("style", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with batch.data():
                code = pyro.sample("code", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                inputs = torch.cat([code, style.expand(code.shape)], -1)
                pixels = dist.Bernoulli(logits=decoder(inputs)).to_event(1)
                pyro.sample("x", pixels, obs=batch.x)

    def encoding(batch: ClientBatch) -> None:
        pyro.module("encoder", encoder)
        with batch.clients():
            loc = pyro.param("loc", torch.zeros(batch.num_clients, 1, 2))
            style = pyro.sample("style", dist.Normal(loc, 0.3).to_event(1))
            with batch.data():
                loc, log_scale = encoder(batch.x).chunk(2, -1)
                code = dist.Normal(loc - 0.1 * style, torch.nn.functional.softplus(log_scale))
                pyro.sample("code", code.to_event(1))

    return styled, encoding


@pytest.mark.slow
def test_an_autoencoder_learns_and_engines_agree() -> None:
    g = torch.Generator().manual_seed(1)
    x = (torch.rand(60, 6, generator=g) < torch.rand(6, generator=g)).float()
    data = hierfl.ClientData.from_arrays(["a"] * 25 + ["b"] * 20 + ["c"] * 15, x=x)
    method = methods.fedsvi(*autoencoder(), optimizer=Adam(0.05))
    runs: Any = ("vectorized", 30), ("vectorized", 3), ("sequential", 3)
    whole, *short = (
        hierfl.fit(method, data, rounds=rounds, seed=0, settings=hierfl.Settings(engine=engine))
        for engine, rounds in runs
    )
    elbo = whole.history["elbo"]
    assert elbo.iloc[-3:].mean() > elbo.iloc[:3].mean() + 10.0
    here, there = (fitted.history["elbo"].tolist() for fitted in short)
    assert here == pytest.approx(there, rel=1e-9)
    sent = whole.federation.server.down(whole.progress.server, hierfl.method.Clock(0, 1))
    weights = (f"{net}$$${of}" for net in ("encoder", "decoder") for of in ("weight", "bias"))
    assert set(sent["params"]) == set(weights)
