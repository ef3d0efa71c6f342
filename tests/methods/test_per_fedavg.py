"""Per-FedAvg: closed-form fixed points, derivatives by finite differences, and its reduction to FedAvg."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import full_batch
from hierfl.methods import per_fedavg
from hierfl.methods.parts.averaging import parts
from hierfl.methods.personalized.per_fedavg import _meta_gradient
from hierfl.optimizers import SGD
from tests.methods.cases import shared as net
from tests.methods.quadratics import I2, START, B, H, P, at, clients, stationary, theta
from tests.programs import federation, fit, read

A = 0.1
FULL: dict[str, Any] = {"inner_optimizer": SGD(A), "optimizer": SGD(0.1), "batch_size": None}


def fixed(meta: str) -> Tensor:
    j = I2 - A * H
    curved = H @ j if meta == "first" else j @ H @ j
    return stationary(P[:, None, None] * curved)


@pytest.mark.parametrize(
    ("meta", "published"),
    [
        ("first", (0.493107, 0.602512)),
        ("full", (0.475296, 0.620012)),
        ("hessian-free", (0.475296, 0.620012)),
    ],
)
def test_fixed_points(meta: Any, published: tuple[float, float]) -> None:
    best = fixed(meta)
    assert best.tolist() == pytest.approx(published, abs=1e-6)
    stays = fit(per_fedavg(at(best), meta=meta, steps=1, **FULL), clients(), rounds=1)
    assert torch.allclose(theta(stays), best, atol=1e-11)
    fast = {**FULL, "optimizer": SGD(0.4)}
    away = fit(per_fedavg(at(START), meta=meta, steps=1, **fast), clients(), rounds=15)
    assert torch.allclose(theta(away), best, atol=0.01)


@pytest.mark.slow
def test_five_steps_a_round_find_another_point() -> None:
    found = fit(per_fedavg(at(fixed("full")), meta="full", steps=5, **FULL), clients(), rounds=60)
    assert theta(found).tolist() == pytest.approx((0.454130, 0.647122), abs=1e-5)


@pytest.mark.parametrize("difference", [1e-3, 0.5])
def test_without_hessians_it_is_exact_for_quadratics(difference: float) -> None:
    one, two = (
        fit(
            per_fedavg(at(START), meta=m, steps=3, difference=difference, **FULL),
            clients(),
            rounds=2,
        )
        for m in ("full", "hessian-free")
    )
    assert torch.allclose(theta(one), theta(two), atol=1e-11, rtol=0.0)


@pytest.mark.parametrize("inner_lr", [0.1, 0.7])
def test_the_full_form_is_the_derivative_through_the_inner_step(inner_lr: float) -> None:
    data = federation((12,))
    program = read(net(), hierfl.guides.delta, data)
    batch, w = full_batch(data), program.start()[0]

    def objective(at: dict[str, Tensor]) -> Tensor:
        gradient = torch.func.grad(lambda p: program.mean_loss(p, batch))(at)
        return program.mean_loss({n: v - inner_lr * gradient[n] for n, v in at.items()}, batch)

    found, value = _meta_gradient(program, w, (batch,) * 3, inner_lr, "full", 1e-3)
    first, _ = _meta_gradient(program, w, (batch,) * 3, inner_lr, "first", 1e-3)
    free, _ = _meta_gradient(program, w, (batch,) * 3, inner_lr, "hessian-free", 1e-3)
    assert float(value) == pytest.approx(float(objective(w)))
    for name, v in w.items():
        numeric = torch.zeros_like(v)
        for i in range(v.numel()):
            by = torch.zeros(v.numel())
            by[i] = 1e-5
            up, down = ({**w, name: v + s * by.view_as(v)} for s in (1, -1))
            numeric.view(-1)[i] = (objective(up) - objective(down)) / 2e-5
        assert torch.allclose(found[name], numeric, atol=1e-8), name
        assert torch.allclose(free[name], numeric, atol=1e-5), name
        assert not torch.allclose(first[name], numeric, atol=1e-3), name


def test_the_three_batches_are_different_rows() -> None:
    batch = full_batch(federation((7,)))
    found = parts(batch, 2, 3)
    rows = torch.cat([part.y[0] for part in found])
    assert torch.equal(rows, batch.y[0, :6])
    again = torch.cat([part.y[0] for part in parts(batch, 3, 3)])
    assert torch.equal(again, batch.y[0, [0, 1, 2, 3, 4, 5, 6, 0, 1]]), "short of rows, it repeats"
    few = parts(full_batch(federation((2,))), 3, 3)
    assert all(int(part.mask().sum()) == 2 for part in few)


def test_a_meta_step_takes_each_gradient_at_its_own_rows() -> None:
    data = federation((9,))
    program = read(net(), hierfl.guides.delta, data)
    w, batches = program.start()[0], parts(full_batch(data), 3, 3)
    nothing = {n: torch.zeros_like(v) for n, v in batches[0].fields.items()}
    for meta, used in (("first", 2), ("hessian-free", 3), ("full", 3)):
        plain, _ = _meta_gradient(program, w, batches, 0.3, meta, 1e-3)  # type: ignore[arg-type]
        for i in range(3):
            other = list(batches)
            other[i] = hierfl.ClientBatch(
                nothing, {}, None, batches[i].counts, batches[i].own_keys, batches[i].root
            )
            moved, _ = _meta_gradient(program, w, tuple(other), 0.3, meta, 1e-3)  # type: ignore[arg-type]
            same = all(torch.equal(moved[n], v) for n, v in plain.items())
            assert same == (i >= used), (meta, i)


@pytest.mark.parametrize("rounds", [0, 1])
def test_predictions_are_one_step_from_theta(rounds: int) -> None:
    """After training from the theta received; after personalize, known or new client, from the last one."""
    before = fit(per_fedavg(at(START), meta="full", steps=2, **FULL), clients(), rounds=2)
    fitted = fit(per_fedavg(at(START), meta="full", steps=2, **FULL), clients(), rounds=3)
    origin = theta(fitted) if rounds else theta(before)
    served = fitted.personalize(clients(), rounds=1) if rounds else fitted
    own = served.progress.table.extra.params["theta"]
    assert torch.allclose(own, origin - A * (H @ (origin - B)[..., None])[..., 0], atol=1e-12)
