"""QLSD and FALD: the law of their chains, what is sent, and their reductions."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, ClientData, ClientError
from hierfl.core import noise
from hierfl.core.trees import restored
from hierfl.methods import fald, qlsd
from hierfl.methods.posteriors.langevin import rounded_at_random
from tests.methods.test_pvi import close
from tests.programs import fit

MANY = 400  # independent unknowns of one chain


def wide(batch: ClientBatch) -> None:
    """Many copies of one Gaussian problem, whose posteriors are Normal(mean, 1 / 4)."""
    w = pyro.sample("w", dist.Normal(torch.zeros(MANY), 1.0).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=batch.y)


def three_rows() -> ClientData:
    """Return three clients of one row each, far from one another."""
    return ClientData.from_clients(
        {n: {"y": torch.full((1, MANY), v)} for n, v in (("a", -3.0), ("b", 1.0), ("c", 6.0))}
    )


@pytest.mark.parametrize("levels", [None, 127])
def test_the_spread_of_the_chain(levels: Any) -> None:
    """P = 4 and gamma = 0.1: variance 1 / (4 (1 - 0.2)) = 0.3125, not 0.25; the mean is 1.

    The memory makes what is rounded small; 127 levels add little, and no bias.
    """
    method = qlsd(wide, step_size=0.1, levels=levels, memory=0.2, draws=20, burn_in=0.3)
    fitted = fit(method, three_rows(), rounds=30)
    points = fitted.message["points"]
    close(points.mean(), 1.0, 0.03)
    slack = 0.02 if levels is None else 0.08
    assert abs(float(points.var(0).mean() * 20 / 19 - 0.3125)) < slack + 0.03


def test_rounding_has_no_bias() -> None:
    vector = torch.tensor([0.3, -1.2, 0.0, 0.05, 2.0])
    keys = noise.fold(noise.root_key(0), torch.arange(4000))
    drawn = torch.vmap(lambda key: restored(rounded_at_random(vector, 3, key)))(keys)
    close(drawn.mean(0), vector, 0.05)
    unit = vector.norm() / 3
    close((drawn / unit - (drawn / unit).round()).abs().max(), 0.0, 1e-5)
    close(drawn[:, 2].abs().max(), 0.0)


@pytest.mark.slow
def test_cohorts_and_memory_reach_the_same_posterior() -> None:
    method = qlsd(wide, step_size=0.05, memory=0.1, draws=40, burn_in=0.5)
    points = fit(method, three_rows(), rounds=160, cohort=2).message["points"]
    close(points.mean(), 1.0, 0.15)


def test_a_chain_that_diverges_is_refused() -> None:
    with pytest.raises(ValueError, match="lower step_size"):
        fit(qlsd(wide, step_size=1e308, levels=None), three_rows(), rounds=2)
    with pytest.raises(ClientError, match="step_size"):
        fit(fald(wide, step_size=1e308), three_rows(), rounds=2)


@pytest.mark.slow("0.0")
@pytest.mark.parametrize("common_noise", [0.0, 0.6])
def test_where_clients_are_alike_it_is_the_pooled_chain(common_noise: float) -> None:
    """P = 4 and gamma = 0.1: every local step is one of the chain, of variance 0.3125, about 1."""
    method = fald(wide, step_size=0.1, steps=4, common_noise=common_noise, draws=20, burn_in=0.3)
    points = fit(method, three_rows(), rounds=30).message["points"]
    close(points.mean(), 1.0, 0.04)
    assert abs(float(points.var(0).mean() * 20 / 19 - 0.3125)) < 0.03


def test_the_noise_of_a_cohort_is_that_of_all() -> None:
    """Two of three equal clients a round, with noise of their own: the variance is the same."""
    equal = ClientData.from_clients({n: {"y": torch.full((1, MANY), 1.0)} for n in "abc"})
    method = fald(wide, step_size=0.1, steps=2, draws=20, burn_in=0.3)
    points = fit(method, equal, rounds=30, cohort=2).message["points"]
    assert abs(float(points.var(0).mean() * 20 / 19 - 0.3125)) < 0.03


@pytest.mark.slow
def test_where_clients_differ_local_steps_move_its_middle() -> None:
    """Clients of 1 and 3 rows: curvatures N (n + 1 / N) = 3 and 7, optima 6 / 3 and -18 / 7.

    K steps at gamma shrink the distance from an optimum to (1 - gamma curvature)^K of it; the fixed
    point is their mean. K = 1 is the pooled mode, (6 - 18) / 10 = -1.2.
    """
    data = ClientData.from_clients(
        {"a": {"y": torch.full((1, MANY), 3.0)}, "b": {"y": torch.full((3, MANY), -3.0)}}
    )
    for steps in (1, 5):
        method = fald(wide, step_size=0.05, steps=steps, temperature=0.0, draws=1)
        z = fit(method, data, rounds=80).message["z"]
        moved = [1.0 - (1.0 - 0.05 * curvature) ** steps for curvature in (3.0, 7.0)]
        wanted = (moved[0] * 2.0 - moved[1] * 18.0 / 7.0) / sum(moved)
        close(z, torch.full((MANY,), wanted), 1e-6)
    assert abs(wanted + 1.2) > 0.05
