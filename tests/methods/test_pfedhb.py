"""pFedHB against its server's objective, a minimizer of it, and FedABML's EM, which it is without."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from hierfl.methods.personalized.hyper_priors import most_likely

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


def test_points_that_agree_leave_a_finite_prior() -> None:
    mu, v = most_likely(torch.tensor([1.0]), torch.tensor([0.0]), 0.0, 5.0)
    assert float(mu) == 1.0 and 0.0 < float(v) < 1e-6
