"""FedHB's mixture prior against hand-worked networks, FedProx, and planted kinds of clients."""

import pytest
import torch

from hierfl.methods import fedhb_mixture
from hierfl.optimizers import SGD
from tests.methods.test_ifca import center, numbers, sets
from tests.programs import fit


def test_clients_and_networks_are_each_other_s_best() -> None:
    """One number each: w_k = (n y_k + r / s^2) / (n + 1 / s^2), r = sum w / (s^2 + 2), s^2 = 0.1.

    Both kinds are 5 apart, so that shares are 0 or 1: two linear equations for each kind.
    """
    data = numbers((-2.0, -1.8, 3.0, 3.2), (10, 10, 10, 10))
    method = fedhb_mixture(
        center,
        spread=0.1**0.5,
        optimizer=SGD(0.4),
        steps=30,
        batch_size=None,
        starts=sets(-1.5, 2.5),
    )
    fitted = fit(method, data, rounds=10)
    for j, ys in enumerate(((-2.0, -1.8), (3.0, 3.2))):
        # w = (10 y + 10 r) / 20, and 2.1 r = sum w = sum(y) / 2 + r
        r = sum(ys) / 2.0 / 1.1
        assert float(fitted.message["theta"]["mu"][j]) == pytest.approx(r, abs=1e-3)
        own = fitted.progress.table["w"]["mu"].flatten()[2 * j : 2 * j + 2].tolist()
        assert own == pytest.approx([(y + r) / 2.0 for y in ys], abs=1e-3)
    assert fitted.progress.table["share"].round().argmax(1).tolist() == [0, 0, 1, 1]


def test_shares_are_soft_where_networks_are_close() -> None:
    """m = 0.1 between 0 and 1 with s^2 = 1: log odds -(0.01 - 0.81) / 2 = 0.4."""
    data = numbers((0.1, 0.1), (4, 4))
    method = fedhb_mixture(center, spread=1.0, optimizer=SGD(1e-9), steps=1, starts=sets(0.1, 1.0))
    fitted = fit(method, data, rounds=1)
    share = torch.tensor([0.0, -0.81 / 2.0]).softmax(0)
    assert fitted.message["share"].tolist() == pytest.approx(share.tolist(), rel=1e-6)
    wanted = [float(2 * c * 0.1 / (1.0 + 2 * c)) for c in share]
    assert fitted.message["theta"]["mu"].tolist() == pytest.approx(wanted, rel=1e-6)
