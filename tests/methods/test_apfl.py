"""APFL: one step by hand, its limits, and where alpha goes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl.methods import apfl
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, B, H, at, clients
from tests.programs import fit


def own(fitted: hierfl.Fit, name: str) -> Tensor:
    value: Any = getattr(fitted.progress.table, name)
    return value["theta"] if name == "v" else value


def by_hand(rounds: int, steps: int, alpha: float, lr: float, alpha_lr: float) -> Any:
    """Run Algorithm 1 on the quadratics; alpha is stepped by the slope of the loss in alpha."""
    theta, v, weight = START.clone(), START.expand(3, 2).clone(), torch.full((3,), alpha)
    for _ in range(rounds):
        ws = []
        for k in range(3):
            w = theta.clone()
            for s in range(steps):

                def loss(a: Tensor, x: Tensor, y: Tensor, k: int = k) -> Tensor:
                    away = a * x + (1.0 - a) * y - B[k]
                    return 0.5 * away @ H[k] @ away

                slope = torch.func.grad(loss, argnums=(0, 1))(weight[k], v[k], w)
                new_w = w - lr * H[k] @ (w - B[k])
                v[k] = v[k] - lr * slope[1]  # the chain rule's alpha is in it
                if s == 0:
                    weight[k] = (weight[k] - alpha_lr * slope[0]).clamp(0.0, 1.0)
                w = new_w
            ws.append(w)
        theta = torch.stack(ws).mean(0)
    return theta, v, weight


@pytest.mark.parametrize(("alpha", "alpha_lr"), [(0.3, 0.0), (0.5, 0.02), (0.7, 0.3)])
def test_rounds_by_hand(alpha: float, alpha_lr: float) -> None:
    method = apfl(
        at(START), alpha=alpha, adaptive=alpha_lr > 0.0, alpha_optimizer=SGD(alpha_lr), optimizer=SGD(0.1),
        steps=4, batch_size=None,
    )  # fmt: skip
    fitted = fit(method, clients(), rounds=3)
    theta, v, weight = by_hand(3, 4, alpha, 0.1, alpha_lr)
    assert torch.allclose(fitted.message["theta"], theta, atol=1e-12)
    assert torch.allclose(own(fitted, "v"), v, atol=1e-12)
    assert torch.allclose(own(fitted, "alpha"), weight, atol=1e-12)
    assert bool((weight != alpha).all()) == (alpha_lr > 0.0)


def test_a_new_client_starts_at_theta_and_moves_its_own_model_alone() -> None:
    fitted = fit(apfl(at(START), alpha=0.5, steps=3, batch_size=None), clients(), rounds=2)
    theta = fitted.message["theta"]
    new = fitted.personalize(clients(), rounds=2)
    v = theta.expand(3, 2).clone()
    for _ in range(6):
        mixed = 0.5 * v + 0.5 * theta
        v = v - 0.1 * 0.5 * (H @ (mixed - B)[..., None])[..., 0]
    assert torch.allclose(own(new, "v"), v, atol=1e-12)
    assert torch.equal(new.message["theta"], theta)
