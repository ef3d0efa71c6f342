"""FedRep, FedPer and FedBABU: optima of quadratics, equalities with other methods, and the head's privacy."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl.methods import by_rows, fedbabu, fedrep
from hierfl.optimizers import SGD
from tests.methods.cases import shared
from tests.methods.quadratics import B, P
from tests.methods.split_quadratics import EVERY_ROW, HC, at, best_v, clients, profile
from tests.programs import federation, fit

PLATES: dict[str, dict[str, Any]] = {
    "by name": {"model": at(), "head": "v"},
    "by plate": {"model": at(plate=True)},
}


def heads(fitted: hierfl.Fit) -> Tensor:
    value: Tensor = fitted.progress.table.params["v"]
    return value.flatten()


@pytest.mark.slow("by plate-3")
@pytest.mark.parametrize(("plate", "steps"), [*zip(PLATES, (1, 3), strict=True)])
def test_with_one_body_step_the_fixed_point_is_the_joint_optimum(plate: str, steps: int) -> None:
    method = fedrep(
        **PLATES[plate], optimizer=SGD(0.3), head_steps=steps, body_steps=1, **EVERY_ROW
    )
    fitted = fit(method, clients(), rounds=50)
    u = fitted.message["u"]
    assert torch.allclose(u, (P * profile() * B[:, 0]).sum() / (P * profile()).sum(), atol=1e-6)
    assert float(u) == pytest.approx(0.345658, abs=2e-6)
    assert torch.allclose(heads(fitted), best_v(u), atol=1e-6)
    assert heads(fitted).tolist() == pytest.approx([0.098151, 1.827171, 1.089711], abs=3e-6)


def test_more_body_steps_weigh_clients_by_how_far_they_go() -> None:
    method = fedrep(at(), head="v", optimizer=SGD(0.1), head_steps=3, body_steps=5, **EVERY_ROW)
    fitted = fit(method, clients(), rounds=40)
    h = HC[:, 0, 0]
    weight = P * (1.0 - (1.0 - 0.1 * h) ** 5) / h * profile()
    wanted = (weight * B[:, 0]).sum() / weight.sum()
    assert float(wanted) == pytest.approx(0.364137, abs=1e-6)
    assert torch.allclose(fitted.message["u"], wanted, atol=1e-6)


def test_fedper_moves_both_parts_at_once() -> None:
    """A step of one client is a step of gradient descent on all its params."""
    data = clients().select(["a"])
    ours = fit(
        fedrep(at(3.0, -2.0), head="v", optimizer=SGD(0.1), body_steps=1, joint=True, **EVERY_ROW),
        data, rounds=1,
    )  # fmt: skip
    assert ours.method.name == "fedper"
    start = torch.tensor([3.0, -2.0])
    after = start - 0.1 * HC[0] @ (start - B[0])
    assert torch.allclose(torch.cat([ours.message["u"], heads(ours)]), after, atol=1e-12)
    turns = fit(
        fedrep(at(3.0, -2.0), head="v", optimizer=SGD(0.1), head_steps=1, body_steps=1, **EVERY_ROW),
        data, rounds=1,
    )  # fmt: skip
    assert torch.allclose(heads(turns), after[1:], atol=1e-12)
    gradient = (HC[0] @ (torch.stack([start[0], after[1]]) - B[0]))[0]
    assert torch.allclose(turns.message["u"], start[:1] - 0.1 * gradient, atol=1e-12)


def test_each_part_has_an_optimizer_of_its_own() -> None:
    """Under momentum a part that is fixed does not move on (trap T9)."""
    options: dict[str, Any] = {"head": "v", "optimizer": SGD(0.1, 0.9), **EVERY_ROW}
    both = fit(fedrep(at(3.0, -2.0), head_steps=3, body_steps=4, **options), clients(), rounds=1)
    head = fit(fedrep(at(3.0, -2.0), head_steps=3, body_steps=0, **options), clients(), rounds=1)
    assert torch.equal(heads(both), heads(head)), "the steps of the body leave the head"
    assert torch.equal(head.message["u"], torch.tensor([3.0]))


def test_a_new_client_fits_its_head_and_no_head_crosses() -> None:
    method = fedrep(shared(), head=["theta.2."], optimizer=SGD(0.1), head_steps=3, unit="step")
    data = federation((5, 3, 7, 1))
    fitted = fit(method, data, rounds=4)
    start = fitted.program.start()[0]
    message = fitted.federation.server.down(fitted.progress.server, hierfl.method.Clock(0, 1))
    assert set(message) == {"theta.0.weight", "theta.0.bias"}
    for name in ("theta.2.weight", "theta.2.bias"):
        assert torch.equal(fitted.message[name], start[name]), "the server has the common start"
    new = fitted.personalize(federation((8,), seed=4), rounds=20)
    for name, value in fitted.message.items():
        assert torch.equal(new.message[name], value)
    assert not torch.equal(new.progress.table.params["theta.2.weight"][0], start["theta.2.weight"])
    alone = fitted.personalize(federation((8,), seed=4), rounds=0)
    scores = [
        f.predict(federation((8,), seed=4), draws=1).scores().log_score.mean() for f in (alone, new)
    ]
    assert scores[1] > scores[0]


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
    tuned = fitted.personalize(clients(), rounds=2).progress.table.extra.params
    for k in range(3):
        w = torch.tensor([theta, 1.5])
        for _ in range(6):
            gradient = HC[k] @ (w - B[k])
            w = w - 0.2 * (gradient if tune == "all" else gradient * torch.tensor([0.0, 1.0]))
        assert tuned["v"][k].item() == pytest.approx(w[1].item(), abs=1e-12)
        assert ("u" in tuned) == (tune == "all")
        if tune == "all":
            assert tuned["u"][k].item() == pytest.approx(w[0].item(), abs=1e-12)
