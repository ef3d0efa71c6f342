"""Differential privacy: how far one client moves a sum, the noise, the budget, DP-PVI, and what is refused."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy import optimize, stats
from torch import nn

import hierfl
from hierfl import Clock, Method
from hierfl.core.secret_noise import new_key, secret_normals
from hierfl.core.trees import as_vector
from hierfl.engine.federation import federate
from hierfl.methods import differentially_private, fedavg, pvi
from hierfl.methods.wrappers.differentially_private import (
    _shortened,
    cost_of_round,
    epsilon_of,
    noise_for_epsilon,
)
from hierfl.models import likelihood, network
from hierfl.optimizers import SGD
from tests.methods.cases import shared
from tests.methods.test_pvi import close, e1, line
from tests.programs import federation, fit

SMALL: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 2, "unit": "step", "batch_size": 2}


def plain() -> Method:
    return fedavg(shared(), **SMALL)


def private(clip: float, noise: float, secret: int | None, method: Method | None = None) -> Method:
    noisy: dict[str, Any] = {"clipping_norm": clip, "noise_multiplier": noise, "secret": secret}
    return differentially_private(method or plain(), **noisy)


def first_params(method: Method, data: hierfl.ClientData) -> torch.Tensor:
    """Return the params that a run starts from, (d,)."""
    return as_vector(federate(method, data, seed=0).server.state)


@pytest.mark.filterwarnings("ignore:field 'y' has mean")
def test_a_client_moves_the_sum_by_twice_the_clip_at_most() -> None:
    """Whatever its rows are: its labels are a million times as large, or not numbers."""
    data = federation((4, 4, 4))
    found = {}
    for size in (1.0, -1e6, 1e152):
        y = data.fields["y"].clone()
        y[:4] = size * (1.0 + y[:4].abs())
        changed = data.with_fields(y=y)
        method = private(0.01, 1e-12, 1)
        found[size] = as_vector(fit(method, changed, rounds=1).message)
    start = first_params(plain(), data)
    for moved in found.values():
        assert bool(moved.isfinite().all())
        assert float((moved - start).norm()) <= 0.01 + 1e-9
        assert float((moved - found[1.0]).norm()) <= 2.0 * 0.01 / 3.0 + 1e-9
    assert float((found[-1e6] - found[1.0]).norm()) > 0.001


def test_an_update_is_shortened_in_its_direction_over_all_shares() -> None:
    moved = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    short = _shortened(moved, 1.0)
    assert torch.allclose(as_vector(short), torch.tensor([0.6, 0.0, 0.8]))
    assert torch.equal(as_vector(_shortened(moved, 5.1)), as_vector(moved))
    for bad in (math.nan, math.inf):
        assert not as_vector(_shortened({"a": torch.tensor([1.0, bad])}, 1.0)).any()


def test_the_noise_is_gaussian_and_as_large_as_it_says() -> None:
    """Steps of size 0 leave noise alone: its sd in one round is noise times clip over the cohort."""
    data = federation((2, 3, 2, 4))
    wide = network(
        nn.Sequential(nn.Linear(2, 40), nn.Linear(40, 1)), likelihood=likelihood.normal(1.0)
    )
    still = fedavg(wide, optimizer=SGD(1e-30), steps=1, unit="step", batch_size=2)
    start = first_params(still, data)
    noisy = (private(2.0, 3.0, secret, still) for secret in range(4))
    draws = [as_vector(fit(m, data, rounds=1, cohort=2).message) - start for m in noisy]
    flat = torch.cat(draws).numpy() / (2.0 * 3.0 / 2)
    assert stats.kstest(flat, "norm").pvalue > 1e-3 and abs(flat.std() - 1.0) < 0.15
    assert stats.kstest(secret_normals(new_key(5), 100_000).numpy(), "norm").pvalue > 1e-3


def test_noise_and_cohorts_are_functions_of_the_secret_alone() -> None:
    data = federation((2, 3, 2, 4, 3))

    def found(secret: int | None, seed: int) -> tuple[torch.Tensor, list[float]]:
        method = private(1.0, 1.0, secret)
        fitted = fit(method, data, rounds=2, cohort=2, seed=seed)
        return as_vector(fitted.message), fitted.history["epsilon"].tolist()

    first, spent = found(3, 0)
    again, _ = found(3, 0)
    assert torch.equal(first, again)
    assert not torch.allclose(found(4, 0)[0], first)
    assert not torch.allclose(found(None, 0)[0], found(None, 0)[0])
    assert all(later > earlier for earlier, later in pairwise(spent))


def test_nodes_cannot_tell_the_cohort_from_the_seed() -> None:
    """A run's cohorts under some secrets are not those of its seed."""
    data = federation((2,) * 5)
    clock = Clock(0, 1)
    drawn = set()
    for secret in range(8):
        method = private(1.0, 1.0, secret)
        server = federate(method, data, seed=0, cohort=3).server
        assert server.cohort_seed is not None
        drawn.add(server.cohort_seed(clock))
        assert server.cohort_seed(clock) == server.cohort_seed(clock)
    assert len(drawn) == 8 and 0 not in drawn


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta of a mechanism that is mu-GDP: Balle and Wang 2018, arXiv:1805.06530, Theorem 8."""
    at = stats.norm.cdf
    return float(at(mu / 2 - epsilon / mu) - math.exp(epsilon) * at(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 1), (8.0, 25), (40.0, 100)])
def test_without_sampling_the_budget_is_that_of_one_gaussian(noise: float, rounds: int) -> None:
    """T rounds in which a client moves the sum by 2 clips are (2 sqrt(T) / noise)-GDP; the bound is near it."""
    mu = 2.0 * math.sqrt(rounds) / noise
    epsilon = epsilon_of(rounds * cost_of_round(noise, 50, 50), 1e-5)
    exact = optimize.brentq(lambda e: gaussian_delta(e, mu) - 1e-5, 1e-6, 20.0)
    assert exact <= epsilon <= 1.25 * exact


def test_sampling_spends_less() -> None:
    whole = epsilon_of(50 * cost_of_round(6.0, 1000, 1000), 1e-5)
    some = epsilon_of(50 * cost_of_round(6.0, 1000, 20), 1e-5)
    assert some < 0.2 * whole


def test_noise_for_a_budget_keeps_within_it_and_no_less_noise_does() -> None:
    noise = noise_for_epsilon(2.0, clients=12, cohort=12, rounds=10, delta=1e-4)
    spent = [epsilon_of(10 * cost_of_round(z, 12, 12), 1e-4) for z in (noise, 0.99 * noise)]
    assert spent[0] <= 2.0 < spent[1]


def test_the_history_states_the_budget() -> None:
    data = federation((2,) * 5)
    method = differentially_private(plain(), clipping_norm=1.0, noise_multiplier=5.0, delta=1e-3)
    fitted = fit(method, data, rounds=3, cohort=2)
    expected = [epsilon_of((r + 1) * cost_of_round(5.0, 5, 2), 1e-3) for r in range(3)]
    assert fitted.history["epsilon"].tolist() == pytest.approx(expected)
    assert set(fitted.history["delta"]) == {1e-3}


def test_clients_keep_what_they_sent() -> None:
    """Without noise q is the prior times the factors that clients keep, also where they are clipped."""
    fitted = fit(private(0.2, 1e-30, 1, pvi(line, draws=2)), e1(), rounds=3)
    state, kept = fitted.progress.server.method, fitted.progress.table.factor
    for q, prior, factor in zip(state.q, state.prior, kept, strict=True):
        close(q - prior - factor.sum(0), 0.0, 1e-9)
    norms = sum(factor.flatten(1).square().sum(1) for factor in kept).sqrt()
    assert float(norms.max()) <= 3 * 0.2 + 1e-6  # three messages of norm 0.2 at most
    assert float(norms.max()) > 0.5


@pytest.mark.parametrize("factors", ["full", "diagonal"])
def test_noise_leaves_a_distribution_that_knows_no_less_than_the_prior(factors: Any) -> None:
    method = pvi(line, factors=factors, draws=2, steps=1)
    state = fit(private(0.5, 3.0, 4, method), e1(), rounds=2).progress.server.method
    bent = torch.linalg.eigvalsh(state.q.precision - state.prior.precision)
    assert float(bent.min()) > -1e-8
