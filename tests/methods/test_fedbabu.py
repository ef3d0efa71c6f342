"""FedBABU: the fixed point under a frozen head, equality with FedRep, and tuning when a client personalizes."""

from typing import Any

import pytest
import torch

from hierfl.methods import by_rows, fedbabu
from hierfl.optimizers import SGD
from tests.methods.quadratics import B, P
from tests.methods.split_quadratics import EVERY_ROW, HC, at, clients
from tests.programs import fit


@pytest.mark.parametrize(("plate", "v"), [(False, 0.0), (True, 1.5)])
def test_the_fixed_point_is_the_best_body_under_the_frozen_head(plate: bool, v: float) -> None:
    head = None if plate else "v"
    slope = HC[:, 0, 0] * B[:, 0] + HC[:, 0, 1] * (B[:, 1] - v)
    wanted = (P * slope).sum() / (P * HC[:, 0, 0]).sum()
    if v == 0.0:
        assert float(wanted) == pytest.approx(0.55, abs=1e-12)
    uniform = slope.sum() / HC[:, 0, 0].sum()
    for best, wrapper in ((wanted, by_rows), (uniform, lambda method: method)):
        start = at(float(best), v, plate=plate)
        method = fedbabu(start, head=head, optimizer=SGD(0.3), **EVERY_ROW)
        assert torch.allclose(fit(wrapper(method), clients(), rounds=2).message["u"], best)


@pytest.mark.parametrize("plate", [False, True])
@pytest.mark.parametrize("tune", ["all", "head"])
def test_personalize_tunes_from_the_common_model(tune: Any, plate: bool) -> None:
    method = fedbabu(
        at(0.4, 1.5, plate=plate), head=None if plate else "v", optimizer=SGD(0.1),
        tune=tune, tune_steps=3, tune_optimizer=SGD(0.2), **EVERY_ROW,
    )  # fmt: skip
    fitted = fit(method, clients(), rounds=2)
    theta = float(fitted.message["u"])
    tuned = fitted.personalize(clients(), rounds=2).progress.table["w"]
    for k in range(3):
        w = torch.tensor([theta, 1.5])
        for _ in range(6):
            gradient = HC[k] @ (w - B[k])
            w = w - 0.2 * (gradient if tune == "all" else gradient * torch.tensor([0.0, 1.0]))
        assert tuned["v"][k].item() == pytest.approx(w[1].item(), abs=1e-12)
        assert ("u" in tuned) == (tune == "all")
        if tune == "all":
            assert tuned["u"][k].item() == pytest.approx(w[0].item(), abs=1e-12)
