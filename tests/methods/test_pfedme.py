"""pFedMe, pFedBayes and Ditto on quadratics: fixed points in closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl import Method, guides
from hierfl.methods import ditto, fedabml, over_relaxed, pfedbayes, pfedme
from hierfl.optimizers import SGD, Adam
from tests.methods.quadratics import I2, START, UNIFORM, B, H, at, clients, stationary
from tests.programs import fit

LAM = 2.0
A = H + LAM * I2
PULL = torch.linalg.solve(A, H)  # P_k = (H_k + lam I)^-1 H_k


def unfinished(k: int, alpha: float) -> Tensor:
    """Return I - (I - alpha (H + lam I))^K, the fraction of the way to the prox that K steps cover."""
    return I2 - torch.linalg.matrix_power(I2 - alpha * A, k)


def quadratic(start: Tensor, alpha: float, eta: float, inner_steps: int, steps: int) -> Method:
    pace: dict[str, Any] = {"optimizer": SGD(alpha), "global_optimizer": SGD(eta)}
    pace |= {"inner_steps": inner_steps, "steps": steps, "batch_size": None}
    return pfedme(at(start, personal=True), prox=LAM, **pace)


@pytest.mark.slow("35-0.3-20-0.05-published2")
@pytest.mark.parametrize(
    ("k", "alpha", "steps", "eta", "published"),
    [
        (5, 0.05, 1, 0.1, (0.287997, 0.818927)),
        (35, 0.3, 1, 0.1, (0.225322, 0.859051)),
        (35, 0.3, 20, 0.05, (0.169665, 0.898737)),
    ],
)
def test_fixed_point(
    k: int, alpha: float, steps: int, eta: float, published: tuple[float, float]
) -> None:
    if steps == 1:
        fixed = stationary(UNIFORM[:, None, None] * unfinished(k, alpha) @ PULL)
    else:
        fixed = stationary(
            UNIFORM[:, None, None] * (I2 - torch.linalg.matrix_power(I2 - eta * LAM * PULL, steps))
        )
    assert fixed.tolist() == pytest.approx(published, abs=1e-6)
    after = fit(quadratic(fixed, alpha, eta, k, steps), clients(), rounds=1)
    assert torch.allclose(after.message["theta"], fixed, atol=1e-9)
    assert bool(((after.draws(1).own["w"][0] - fixed).norm(dim=1) > 0.1).all())


def test_one_round_by_hand() -> None:
    alpha, eta, beta = 0.05, 0.1, 1.5
    method = over_relaxed(quadratic(START, alpha, eta, 2, 2), beta)
    fitted = fit(method, clients(), rounds=1)
    copies, own = [], []
    for h, b in zip(H, B, strict=True):
        w, v = START, START  # where the first prox starts; later ones start at the previous prox
        for _ in range(2):
            for _ in range(2):
                v = v - alpha * (h @ (v - b) + LAM * (v - w))
            w = w - eta * LAM * (w - v)
        copies.append(w)
        own.append(v)
    expected = (1 - beta) * START + beta * torch.stack(copies).mean(0)
    assert torch.allclose(fitted.message["theta"], expected, atol=1e-13)
    assert torch.allclose(fitted.draws(1).own["w"][0], torch.stack(own), atol=1e-13)


def bayes(model: Any, how: dict[str, Any]) -> Method:
    pace: dict[str, Any] = {"optimizer": Adam(0.02), "global_optimizer": Adam(0.0)}
    return pfedbayes(model, kl_weight=1.0, **pace, **how, draws=64, inner_steps=1, steps=200)


def abml(model: Any, how: dict[str, Any]) -> Method:
    pace: dict[str, Any] = {"optimizer": SGD(0.1), "global_optimizer": SGD(0.0), "unit": "step"}
    guide = guides.mean_field(init_scale=0.5)
    return fedabml(model, guide, kl_weight=1.0, **pace, **how, draws=32, steps=100)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bayes, abml])
def test_posteriors_under_a_fixed_prior_are_the_gaussian_ones(make: Any) -> None:
    """With Normal rows and prior, zeta = 1 and eta = 0, q_k is Normal(m, s^2).

    m is the posterior mean, and s^-2 the diagonal of n H + I.
    """
    prior = torch.zeros(2)
    fitted = fit(make(at(prior, personal=True), {"batch_size": None}), clients(), rounds=1)
    table = fitted.progress.table.params
    loc, scale = table["w.loc"][:, 0, 0], torch.nn.functional.softplus(table["w.scale"][:, 0, 0])
    precision = torch.tensor([5.0, 3.0, 2.0])[:, None, None] * H + I2
    mean = torch.linalg.solve(precision, (precision - I2) @ B[..., None])[..., 0]
    assert torch.allclose(loc, mean, atol=0.05)
    assert torch.allclose(scale, precision.diagonal(dim1=-2, dim2=-1) ** -0.5, rtol=0.08)
    assert torch.equal(fitted.message["theta"], prior)


def test_dittos_personal_models_at_fedavgs_fixed_point() -> None:
    lam, theta = 0.5, torch.tensor([0.479235, 0.617678])
    method = ditto(
        at(theta), prox=lam, optimizer=SGD(0.1), steps=5, personal_steps=250, batch_size=None
    )
    fitted = fit(method, clients(), rounds=1)
    wanted = torch.linalg.solve(H + lam * I2, (H @ B[..., None])[..., 0] + lam * theta)
    assert torch.allclose(fitted.progress.table.params["theta"], wanted, atol=1e-9)
    published = [(0.826412, 0.123536), (0.201431, 1.472082), (-0.260382, 0.945383)]
    assert torch.allclose(wanted, torch.tensor(published), atol=2e-6)
