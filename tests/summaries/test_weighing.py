"""A client's exact log marginal likelihood, by importance sampling about its factor."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch
from hierfl.core.process import double_precision
from hierfl.summaries import weighing
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.reading import read_likelihood, seen_line
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surrogate import Surrogate
from hierfl.summaries.weighing import Ratios, central_variance, ratios_of, standard_points
from tests.summaries import programs
from tests.summaries.programs import (
    binary_rows,
    factor_of_rows,
    packed_rows,
    people,
    program_of,
    rows_of_client,
)


def marginals(model: Any, client: int, draws: Tensor) -> Ratios:
    """Return the log marginals of a client about a factor made where the server knows little.

    They are what the server knows, the log marginal of the factor, and what the client adds.
    """
    reading = read_likelihood(program_of(model))
    hierarchy, line = seen_hierarchy(reading), seen_line(reading)
    batch, size = rows_of_client(people(), client), reading.size
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, batch)
        factor = factor_of_rows(rows, torch.zeros(size), 2.0 * torch.eye(size))
        found = ratios_of(hierarchy, rows, factor[:2], draws, fields={}, keys=batch.key)
        found = Ratios(found.log[0], found.error[0])
        alone = Factors(factor.precision, factor.shift, {})
        known = Surrogate(hierarchy).log_marginals(draws, alone)[1][:, 0]
        return found._replace(log=found.log + known)


Z = torch.tensor([[0.0, 0.0], [1.5, 0.8], [-2.0, -1.0], [0.5, -4.0]], dtype=torch.float64)
THREE = torch.tensor([[0.5], [0.1], [1.2]])


@pytest.mark.parametrize("client", [0, 3])
def test_the_marginal_of_a_logistic_random_intercept_is_that_of_a_grid(client: int) -> None:
    """At each (mu, log tau), the sum over the level by 2,000 nodes."""
    found = marginals(programs.binary, client, Z)
    rows = binary_rows(people())[client]
    e = np.linspace(-9.0, 9.0, 2001)
    weight = np.exp(-0.5 * e**2)
    for at, log in zip(Z.tolist(), found.log.tolist(), strict=True):
        known = np.log((np.exp(rows(at[0] + np.exp(at[1]) * e)) * weight).sum() / weight.sum())
        assert log == pytest.approx(known, abs=2e-3)


def test_more_nodes_are_taken_where_few_are_rough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a steep likelihood, a step of the level, ten nodes are off, and clients notice."""

    def steep(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.data():
                pyro.sample("ill", dist.Bernoulli(logits=12.0 * a), obs=batch.ill)

    rows, e = binary_rows(people())[0], np.linspace(-9.0, 9.0, 4001)
    known, errors = [], []
    for mu, log_tau in Z[:3].tolist():
        each = np.exp(rows(12.0 * (mu + np.exp(log_tau) * e)) - 0.5 * e**2)
        known.append(np.log(each.sum() / np.exp(-0.5 * e**2).sum()))
    for most in (1e9, 0.0):
        monkeypatch.setattr(weighing, "ERROR", most)
        off = marginals(steep, 0, Z[:3]).log.numpy() - known
        errors.append(np.abs(off - off.mean()).max())
    assert errors[1] < 0.5 * errors[0], errors


def test_gaussian_rows_are_exact() -> None:
    """The ratio to the factor is constant, and the log marginal is the closed form."""
    found = marginals(programs.spread, 0, Z)
    y = people().fields["y"][:5]
    for (mu, log_tau), log in zip(Z.unbind(0), found.log, strict=True):
        covariance = 0.49 * torch.eye(5) + (2.0 * log_tau).exp()
        known = torch.distributions.MultivariateNormal(mu.expand(5), covariance).log_prob(y)
        assert torch.allclose(log, known, atol=1e-8)


@pytest.mark.parametrize("size", [10, 28])
def test_quasi_random_points_have_the_moments_of_a_standard_normal(size: int) -> None:
    """The mean of each set is 0, and its variances are 1."""
    one: Any = SimpleNamespace(normal_size=size, mixing_size=0)
    with double_precision():
        points, log_weights = standard_points(one, times=4)
    assert torch.allclose(points.mean(1), torch.zeros(1, dtype=points.dtype), atol=1e-12)
    assert torch.allclose(points.square().mean(1), torch.ones(1, dtype=points.dtype))
    assert torch.allclose(log_weights.exp().sum(1), torch.ones(1, dtype=points.dtype))
    if points.shape[1] >= 4 * size:
        eye = torch.eye(size, dtype=points.dtype)
        assert torch.allclose(points.mT @ points / points.shape[1], eye, atol=1e-12)


@pytest.mark.parametrize("size", [3, 6])
def test_points_of_few_scalars_reach_into_tails(size: int) -> None:
    """Their weights make them standard normal, and some lie where a Gaussian has no points."""
    one: Any = SimpleNamespace(normal_size=size, mixing_size=0)
    with double_precision():
        points, log_weights = standard_points(one, times=weighing.TIMES[-1])
    share = log_weights.exp()
    assert torch.allclose(share.sum(1), torch.ones(1, dtype=share.dtype))
    mean, variances = ((share[..., None] * of).sum(1) for of in (points, points.square()))
    assert torch.allclose(mean, torch.zeros_like(mean), atol=1e-12)
    assert torch.allclose(variances, torch.ones_like(variances), atol=0.2)
    assert torch.allclose(variances.mean(0), torch.ones_like(variances[0]), atol=0.02)
    assert float(points.abs().max()) > 6.0


def test_errors_of_draws_far_out_do_not_count() -> None:
    error = torch.cat([0.1 * torch.randn(3, 960), torch.full((3, 40), 50.0)], 1)
    assert torch.allclose(central_variance(error).sqrt(), torch.full((3,), 0.1), atol=0.02)
    assert float(central_variance(torch.full((1, 50), 7.0))) == 0.0


@pytest.mark.slow
def test_the_reported_error_is_no_less_than_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 40 rotations of the points, the log ratio spreads by less than the reported error."""
    monkeypatch.setattr(weighing, "NOISE", 1e9)  # the fewest points
    found = ratios_of_three_effects(40)
    spread = torch.stack([one.log for one in found]).std(0).square().mean().sqrt()
    reported = torch.stack([one.error for one in found]).square().mean().sqrt()
    assert spread > 0.0 and 1.0 < float(reported / spread) < 6.0


def test_more_points_are_taken_where_few_are_rough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "NOISE", 1e9)
    few = torch.stack([one.log for one in ratios_of_three_effects(8)]).std(0).max()
    monkeypatch.setattr(weighing, "NOISE", 0.0)
    many = torch.stack([one.log for one in ratios_of_three_effects(8)]).std(0).max()
    assert many < 0.5 * few


def test_errors_are_noise_from_draw_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """At equal draws the ratios differ by turns; those of other keys differ in other directions."""
    monkeypatch.setattr(weighing, "NOISE", 1e9)
    z = torch.tensor([[1.2]]).expand(2 * weighing.TURNS, 1)
    first, second = (one.log.flatten() for one in ratios_of_three_effects(2, z))
    turn, again = first.split(weighing.TURNS)
    assert torch.allclose(turn, again) and len(turn.unique()) == weighing.TURNS
    assert float(torch.corrcoef(torch.stack([turn, second[: weighing.TURNS]]))[0, 1].abs()) < 0.4


def test_errors_average_out_over_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of points, however rotated, has one error of its radii, which adds up over clients."""
    z = torch.tensor([[0.4], [1.2]]).repeat_interleave(weighing.TURNS, 0)

    def difference(noise: float) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(weighing, "NOISE", noise)
        log = torch.stack([one.log.flatten() for one in ratios_of_three_effects(2, z)])
        low, high = log.split(weighing.TURNS, 1)
        return (high - low).mean(), (high - low).std()

    few, sd = difference(1e9)
    assert (few - difference(0.0)[0]).abs() < 0.3 * sd


def ratios_of_three_effects(turns: int, z: Tensor = THREE) -> list[Ratios]:
    """Return ratios of a client with three local scalars, under rotations of the points."""
    reading = read_likelihood(program_of(programs.three_effects))
    hierarchy, line = seen_hierarchy(reading), seen_line(reading)
    batch = rows_of_client(people(), 2)
    with double_precision(), torch.no_grad(), pyro.validation_enabled(False):
        rows = packed_rows(line, batch)
        factor = factor_of_rows(rows, torch.zeros(3), torch.eye(3))
        return [
            ratios_of(
                hierarchy, rows, factor[:2], z.double(), fields={}, keys=batch.redrawn(turn).key
            )
            for turn in range(turns)
        ]
