"""FALD against the pooled chain's known moments, its fixed point by hand, and QLSD."""

import pytest
import torch

from hierfl.data.clients import ClientData
from hierfl.engine.chunks import ClientError
from hierfl.methods import fald
from tests.methods.test_pvi import close
from tests.methods.test_qlsd import MANY, three_rows, wide
from tests.programs import fit


@pytest.mark.parametrize("common_noise", [0.0, 0.6])
def test_where_clients_are_alike_it_is_the_pooled_chain(common_noise: float) -> None:
    """P = 4 and gamma = 0.1: every local step is one of the chain, of variance 0.3125, about 1."""
    method = fald(wide, step_size=0.1, steps=4, common_noise=common_noise, draws=20, burn_in=0.3)
    points = fit(method, three_rows(), rounds=60).message["points"]
    close(points.mean(), 1.0, 0.04)
    assert abs(float(points.var(0).mean() * 20 / 19 - 0.3125)) < 0.03


def test_the_noise_of_a_cohort_is_that_of_all() -> None:
    """Two of three equal clients a round, with noise of their own: the variance is the same."""
    equal = ClientData.from_clients({n: {"y": torch.full((1, MANY), 1.0)} for n in "abc"})
    method = fald(wide, step_size=0.1, steps=2, draws=20, burn_in=0.3)
    points = fit(method, equal, rounds=60, cohort=2).message["points"]
    assert abs(float(points.var(0).mean() * 20 / 19 - 0.3125)) < 0.03


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


def test_what_it_refuses() -> None:
    with pytest.raises(ClientError, match="step_size"):
        fit(fald(wide, step_size=1e308), three_rows(), rounds=2)
