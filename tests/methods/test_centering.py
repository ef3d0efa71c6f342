"""Coordinates of numbers that other sites scale, and chains that start where the scales' mass is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl.core.process import double_precision
from hierfl.engine.federation import federate
from hierfl.methods.stages.centering import Centering, ScaledPoint
from hierfl.program.handlers import unchecked
from hierfl.runs.ended import Fallback

P, NOISE = torch.tensor([1.5, -0.6, 0.02], dtype=torch.float64), 0.3


def product(x: torch.Tensor) -> torch.Tensor:
    """Return the log density of (e (3,), log s), of which rows see s e with noise: y = P."""
    e, s = x[..., :3], x[..., 3:].exp()
    seen = ((s * e - P) / NOISE).square().sum(-1)
    return -0.5 * (e.square().sum(-1) + seen + (x[..., 3] - 0.1).square())


def slopes(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: product(x).sum())(x)


def conditional(log_s: float) -> tuple[torch.Tensor, float]:
    """Return the mode (3,) and sd of e given s."""
    s = np.exp(log_s)
    precision = 1.0 + s**2 / NOISE**2
    return s * P / NOISE**2 / precision, precision**-0.5


def of_product(log_s: float) -> Centering:
    at = torch.cat([conditional(log_s)[0], torch.tensor([log_s], dtype=torch.float64)])
    inside, sd = torch.arange(3), torch.full((4,), 0.3, dtype=torch.float64)
    return ScaledPoint(slopes, at, sd, torch.ones(3), inside, torch.tensor([3]), 4, 0).centering()


def test_numbers_follow_their_mode_and_sd_along_a_product() -> None:
    centering = of_product(0.2)
    sd = conditional(0.2)[1]
    for log_s in (-1.5, -0.5, 0.8, 1.5):
        x = torch.cat([centering.mode[:3], torch.tensor([log_s], dtype=torch.float64)])
        aside = x + sd * torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
        middle, one_sd = centering.at(torch.stack([x, aside]))[0][:, :3]
        mode, new = conditional(log_s)
        assert ((middle - mode).abs() < 0.25 * new).all()
        assert ((one_sd - middle) / new - 1.0).abs().max() < 0.1


def test_there_and_back_and_the_volume() -> None:
    centering = of_product(-0.3)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    numbers, volume = centering.at(x)
    torch.testing.assert_close(centering.back(numbers), x)
    torch.testing.assert_close(numbers[:, 3:], x[:, 3:])
    assert isinstance(volume, torch.Tensor)
    for point, grown in zip(x, volume, strict=True):
        jacobian = torch.func.jacrev(lambda one: centering.at(one[None])[0][0])(point)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, grown)


def test_what_nothing_scales_is_left() -> None:
    def normal(x: torch.Tensor) -> torch.Tensor:
        return -x - x.flip(1) * 0.3

    at, sd = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    first, second = torch.arange(2)[:, None]
    centering = ScaledPoint(normal, at, sd, torch.full((1,), 0.2), first, second, 2, 0).centering()
    assert not len(centering.mode)


AGES, CLIENTS, EACH, SIGMA = 9, 6, 20, 0.4


def walks() -> hierfl.ClientData:
    rng = np.random.default_rng(31)
    client, age = np.repeat(np.arange(CLIENTS), EACH), np.tile(np.arange(10), 2 * CLIENTS)
    walk = np.cumsum(np.r_[0.0, 0.5 + 0.15 * rng.standard_normal(AGES)])
    y = walk[age] + 0.25 * rng.standard_normal(CLIENTS)[client]
    y = y + SIGMA * rng.standard_normal(len(y))
    frame = pd.DataFrame({"client": client, "age": age, "y": y})
    return hierfl.ClientData.from_frame(frame, "client")


def program(batch: hierfl.ClientBatch) -> None:
    """A walk over ages whose steps a global site scales, as written without centering."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    step = pyro.sample("step", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(AGES), 1.0).to_event(1))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    walk = torch.cat([torch.zeros(1), torch.cumsum(step * z, -1)], -1)
    with batch.clients():
        region = pyro.sample("region", dist.Normal(0.0, between))
        with batch.data():
            mean = intercept + walk[..., batch.age] + region
            pyro.sample("y", dist.Normal(mean, SIGMA), obs=batch.y)


def exact_steps(data: hierfl.ClientData) -> tuple[float, float]:
    """Return the mean and sd of log step: all else is Gaussian given it and `between`."""
    age, y = data.fields["age"].numpy(), data.fields["y"].double().numpy()
    steps, own = age[:, None] > np.arange(AGES), np.eye(CLIENTS)[data.row_client.numpy()]
    design = np.c_[np.ones(len(y)), steps, own]
    grid = np.linspace(-2.5, 1.5, 41)
    log_sds = np.stack(np.meshgrid(grid, np.linspace(-5.0, 1.5, 25), indexing="ij"), -1)
    of_sites = np.repeat(log_sds, [AGES, CLIENTS], -1)
    sds = np.exp(np.insert(of_sites, 0, np.log(10.0), -1)) / SIGMA
    precision = np.eye(len(design.T)) + sds[..., None] * (design.T @ design) * sds[..., None, :]
    shift = sds * (design.T @ y) / SIGMA
    explained = (shift * np.linalg.solve(precision, shift[..., None])[..., 0]).sum(-1)
    log_p = 0.5 * (explained - np.linalg.slogdet(precision)[1] - np.exp(2.0 * log_sds).sum(-1))
    log_p += log_sds.sum(-1)
    weights = np.exp(log_p - log_p.max()).sum(1)
    mean = np.average(grid, weights=weights)
    return mean, np.sqrt(np.average((grid - mean) ** 2, weights=weights))


@pytest.mark.slow
def test_chains_start_about_the_mode_of_the_scale_of_steps_with_these_centered() -> None:
    data = walks()
    chains = Fallback(federate(hierfl.methods.two_stage(program), data, seed=0), None).chains
    with double_precision(), torch.no_grad(), unchecked():
        draws = torch.randn(256, 3 + AGES, generator=torch.Generator().manual_seed(0))
        start = chains._starts.heaviest(draws.double())
        log_step = chains.joint.z_of(start.points, start.standard)[:, 1]
    mean, sd = exact_steps(data)
    assert len(start.standard.centering.mode)
    assert abs(log_step.mean() - mean) < sd
    assert 0.7 < log_step.std() / sd < 1.4


@pytest.mark.slow
def test_chains_find_the_scale_of_steps_that_rows_decide() -> None:
    data = walks()
    fit = hierfl.fit(program, data, seed=0, progress=False)
    steps = np.log(fit.posterior(4000, seed=1)["posterior"]["step"].to_numpy())
    mean, sd = exact_steps(data)
    assert abs(steps.mean() - mean) < 0.1 * sd
    assert 0.9 < steps.std() / sd < 1.1
    assert str(fit.summary().verdict).startswith("Trustworthy")
