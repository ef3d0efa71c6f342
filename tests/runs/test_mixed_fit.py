"""Discrete sites of all clients: a fit for each value, weighted by its evidence, which is exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import halfnorm

import hierfl
from hierfl import ClientBatch, ClientData, ProgramError
from hierfl.diagnostics import log_evidence

CLIENTS, ROWS, PRIOR = 6, 10, (0.4, 0.6)


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of all rows, client after client; y rises with |x|, a little."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=CLIENTS * ROWS)
    own = np.repeat(rng.normal(0.5, 0.7, size=CLIENTS), ROWS)
    return x, own + 0.08 * x**2 + rng.normal(size=len(x))


@pytest.fixture(scope="module")
def rows() -> ClientData:
    x, y = numbers()
    clients = torch.arange(CLIENTS).repeat_interleave(ROWS)
    return ClientData.from_arrays(clients, x=torch.from_numpy(x), y=torch.from_numpy(y))


def model(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    power = pyro.sample("power", dist.Categorical(torch.tensor(PRIOR)))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, 0.7))
        with batch.data():
            y = dist.Normal(own + slope * batch.x ** (power + 1), sigma)
            pyro.sample("y", y, obs=batch.y)


def log_evidence_by_hand(power: int) -> float:
    """Return log p(y, power): Gaussian given sigma, over which a grid sums."""
    x, y = numbers()
    x, same = x ** (power + 1), np.kron(np.eye(CLIENTS), np.ones((ROWS, ROWS)))
    rest = 4.0 + np.outer(x, x) + 0.49 * same
    at, axes = np.linalg.eigh(rest)
    sigma = np.linspace(0.3, 3.0, 4001)
    spread = at + sigma[:, None] ** 2
    log_p = -0.5 * ((axes.T @ y) ** 2 / spread + np.log(2 * np.pi * spread)).sum(1)
    log_p = log_p + halfnorm(scale=2.0).logpdf(sigma)
    return float(logsumexp(log_p) + np.log(sigma[1] - sigma[0]) + np.log(PRIOR[power]))


@pytest.fixture(scope="module")
def mixed(rows: ClientData) -> Any:
    return hierfl.fit(model, rows, seed=0)


def test_probabilities_and_draws_are_those_of_the_evidence(mixed: Any) -> None:
    logs = np.array([log_evidence_by_hand(power) for power in (0, 1)])
    by_hand = np.exp(logs - logsumexp(logs))
    table = mixed.probabilities
    np.testing.assert_allclose(table["log_evidence"], logs, atol=4 * table["error"].max())
    np.testing.assert_allclose(table["probability"], by_hand, atol=0.02)
    assert 0.1 < by_hand[0] < 0.9  # both values count
    posterior = mixed.posterior(1000, seed=0).posterior
    share = float((posterior["power"] == 1).mean())
    assert share == pytest.approx(table["probability"][1], abs=1e-3)
    slopes = [float(fit.get_samples(draws=2000)["slope"].mean()) for fit in mixed.fits]
    slope = np.dot(slopes, table["probability"])
    assert float(posterior["slope"].mean()) == pytest.approx(slope, abs=0.02)
    assert posterior["own"].sizes["client"] == CLIENTS
    samples = mixed.get_samples(draws=1000, seed=0)
    assert samples["own"].shape == (1000, CLIENTS, 1)
    assert float((samples["power"] == 1).double().mean()) == share
    assert mixed.replicate(mixed.fits[0].federation.data, draws=20).shape == (20, CLIENTS * ROWS)


def test_a_summary_has_the_probabilities_and_a_verdict(mixed: Any) -> None:
    summary = mixed.summary(draws=400)
    assert summary.trustworthy
    assert "probability" in str(summary)
    assert set(summary.frame.site) == {"power", "mu", "slope", "sigma", "own"}


def test_what_one_fit_alone_answers_is_refused_by_name(mixed: Any) -> None:
    with pytest.raises(
        AttributeError, match=r"'power' has its own fit: .* fit\.fits\[0\]\.effects"
    ):
        mixed.effects()


def line(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, 0.7))
        with batch.data():
            pyro.sample("y", dist.Normal(own + slope * batch.x, sigma), obs=batch.y)


@pytest.mark.slow
def test_evidence_without_rows_is_the_same(rows: ClientData, tmp_path: Path) -> None:
    by_hand = log_evidence_by_hand(0) - np.log(PRIOR[0])
    hierfl.fit(line, rows, seed=0).save(tmp_path / "fit")
    variational = hierfl.fit(hierfl.methods.fedsvi(line), rows, rounds=300, seed=0)
    for fit in (hierfl.load(tmp_path / "fit", model=line), variational):
        evidence = log_evidence(fit)
        assert evidence.error < 0.05
        assert evidence.value == pytest.approx(by_hand, abs=4 * evidence.error)


def test_more_than_64_values_are_refused_with_their_number(rows: ClientData) -> None:
    def many(batch: ClientBatch) -> None:
        with pyro.plate("columns", 7):
            chosen = pyro.sample("chosen", dist.Bernoulli(0.5))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(chosen.sum(-1) * batch.x, 1.0), obs=batch.y)

    with pytest.raises(ProgramError, match="chosen, have 128 joint values, and 64 is the limit"):
        hierfl.fit(many, rows, seed=0)


@pytest.mark.slow
def test_a_program_with_no_other_unknown_has_probabilities(rows: ClientData) -> None:
    def either(batch: ClientBatch) -> None:
        which = pyro.sample("which", dist.Bernoulli(0.5))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(which, 1.0), obs=batch.y)

    y = rows.fields["y"]
    logs = torch.stack([dist.Normal(k, 1.0).log_prob(y).sum() for k in (0.0, 1.0)])
    mixed: Any = hierfl.fit(either, rows, seed=0)
    table = mixed.probabilities
    np.testing.assert_allclose(table["probability"], logs.softmax(0).numpy(), rtol=1e-3)


def test_labels_of_a_vector_that_global_sites_alone_depend_on_are_summed_out() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=g)
    y = x @ torch.tensor([1.0, 0.0, 0.4]) + torch.randn(90, generator=g)
    rows = ClientData.from_arrays(torch.arange(3).repeat_interleave(30), x=x, y=y)

    def spike_and_slab(batch: ClientBatch) -> None:
        with pyro.plate("columns", 3):
            chosen = pyro.sample("chosen", dist.Bernoulli(0.5))
            slope = pyro.sample("slope", dist.Normal(0.0, 0.05 + 0.95 * chosen))
        with batch.clients():
            own = pyro.sample("own", dist.Normal(0.0, 0.3))
            with batch.data():
                pyro.sample("y", dist.Normal(own + (batch.x * slope).sum(-1), 1.0), obs=batch.y)

    fit = hierfl.fit(spike_and_slab, rows, seed=0)
    # Gaussian given the labels: their probabilities by the sum over eight values
    same = 0.09 * torch.kron(torch.eye(3), torch.ones(30, 30)) + torch.eye(90)
    values = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    spreads = (same + (x * (0.05 + 0.95 * v) ** 2) @ x.T for v in values)
    zero = torch.zeros(90)
    logs = torch.stack([dist.MultivariateNormal(zero, spread).log_prob(y) for spread in spreads])
    by_hand = logs.double().softmax(0) @ values.double()
    inferred = fit.infer_discrete(draws=4000, seed=0)
    chances = inferred.frame[1].to_numpy()
    np.testing.assert_allclose(chances, by_hand.numpy(), atol=0.03)
    drawn = inferred.draws["chosen"].double().mean(0)
    np.testing.assert_allclose(drawn, chances, atol=0.03)
