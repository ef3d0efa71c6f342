"""pFedHB against its server's objective, a minimizer of it, and FedABML's EM, which it is without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import softplus

from hierfl.methods import pfedhb
from hierfl.methods.personalized.pfedhb import most_likely
from hierfl.optimizers import SGD
from tests.methods.test_pfedvem import scalar, views
from tests.methods.test_pvi import close
from tests.programs import fit

M, S2, C = np.array([0.5, 1.5, -0.2]), np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.3, 0.2])


def found(a: float, b: float) -> tuple[float, float]:
    """Return the server's mu and v for three clients."""
    mean = float(C @ M)
    around = torch.tensor([float(C @ (S2 + (M - mean) ** 2))])
    mu, v = most_likely(torch.tensor([mean]), around, a, b)
    return float(mu), float(v)


@pytest.mark.parametrize(("a", "b"), [(0.7, 0.4), (5.0, 5.0), (0.0, 2.0), (3.0, 0.0), (0.0, 0.0)])
def test_the_server_minimizes_its_objective(a: float, b: float) -> None:
    """A minimizer over (mu, log v), of the sum of the clients' KLs and the two penalties."""

    def objective(at: Any) -> Any:
        mu, v = at[0], np.exp(at[1])
        kl = 0.5 * (np.log(v / S2) + (S2 + (M - mu) ** 2) / v - 1.0)
        return C @ kl + a * mu**2 + b * v

    best = minimize(objective, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9}).x
    assert found(a, b) == pytest.approx((best[0], np.exp(best[1])), abs=1e-6)


def test_it_finds_the_spread_of_clients_and_the_penalties_shrink_it() -> None:
    """Planted: 40 clients about 2 with a standard deviation of 1.5, each seen 20 times."""
    ys = 2.0 + 1.5 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"optimizer": SGD(0.2), "steps": 60, "unit": "step", "draws": 1}
    model, data = scalar(prior_scale="learned", scale_start=1.0), views(*ys.tolist(), rows=20)
    variances = []
    for a, b in ((1e-3, 1e-3), (0.02, 0.5)):
        method = pfedhb(model, **how, mean_penalty=a, variance_penalty=b)
        fitted = fit(method, data, rounds=6)
        mu, v = fixed_point(ys, 20.0, a, b)
        close(fitted.message["theta.weight"].flatten(), [mu], 0.1)
        close(softplus(fitted.message["scale.weight"]).flatten(), [v**0.5], 0.06)
        variances.append(v)
    assert abs(variances[0] - 1.5**2) < 0.3 and variances[1] < 0.6 * variances[0]


def fixed_point(ys: torch.Tensor, precision: float, a: float, b: float) -> tuple[float, float]:
    """Return where conjugate posteriors of the clients and a quadratic's root in v agree."""
    mu, v = 0.0, 1.0
    for _ in range(200):
        s2 = 1.0 / (precision + 1.0 / v)
        m = s2 * (precision * ys + mu / v)
        mu = float(m.mean()) / (1.0 + 2.0 * a * v)
        whole = s2 + float((m - mu).square().mean())
        v = float(max(np.roots([2.0 * b, 1.0, -whole])))
    return mu, v


def test_points_that_agree_leave_a_finite_prior() -> None:
    mu, v = most_likely(torch.tensor([1.0]), torch.tensor([0.0]), 0.0, 5.0)
    assert float(mu) == 1.0 and 0.0 < float(v) < 1e-6
