"""The proposal of scales: its density, and how it covers the points it was fitted to."""

import math

import pytest
import torch

from hierfl.core.importance_sampling import normal_points
from hierfl.core.proposal import fitted
from hierfl.program.few_rows import double_precision


def skewed(count: int, seed: int) -> torch.Tensor:
    """Return correlated, skewed points, (count, 2)."""
    g = torch.Generator().manual_seed(seed)
    e = torch.randn(count, 2, generator=g, dtype=torch.float64)
    x = torch.stack([e[:, 0], 0.6 * e[:, 0] + 0.8 * e[:, 1]], 1)
    return torch.stack([x[:, 0], (0.7 * x[:, 1]).exp()], 1)


def test_importance_weights_of_the_density_give_known_moments() -> None:
    with double_precision():
        _check_moments()


def _check_moments() -> None:
    points = skewed(2000, 0)
    proposal = fitted(points, torch.full((2000,), 1.0 / 2000))
    y, log_q = proposal.at(normal_points(16384, 3, seed=1))
    x = torch.stack([y[:, 0], y[:, 1].clamp(min=1e-300).log() / 0.7], 1)
    away = torch.stack([x[:, 0], (x[:, 1] - 0.6 * x[:, 0]) / 0.8], 1)
    log_p = -0.5 * away.square().sum(1) - x[:, 1] * 0.7
    log_w = torch.where(y[:, 1] > 0.0, log_p - log_q, -torch.inf)
    w = log_w.softmax(0)
    assert 1.0 / float(w.square().sum()) > 0.7 * len(w)
    assert float(w @ y[:, 0]) == pytest.approx(0.0, abs=0.01)
    assert float(w @ y[:, 0].square()) == pytest.approx(1.0, abs=0.02)
    assert float(w @ y[:, 1]) == pytest.approx(math.exp(0.5 * 0.49), rel=0.01)
    # E[x1 exp(0.7 x2)] = cov(x1, 0.7 x2) E[exp(0.7 x2)]
    known = 0.42 * math.exp(0.5 * 0.49)
    assert float(w @ (y[:, 0] * y[:, 1])) == pytest.approx(known, rel=0.03)


def test_the_density_is_that_of_the_points() -> None:
    """In one dimension the density integrates to the probability between two quantiles."""
    with double_precision():
        _check_area()


def _check_area() -> None:
    points = skewed(500, 1)[:, 1:]
    proposal = fitted(points, torch.full((500,), 1.0 / 500))
    y, log_q = proposal.at(normal_points(8192, 2, seed=2))
    order = y[:, 0].argsort()
    y, density = y[order, 0], log_q[order].exp()
    inside = (y > y.quantile(0.05)) & (y < y.quantile(0.95))
    area = torch.trapezoid(density[inside], y[inside])
    assert float(area) == pytest.approx(0.9, abs=0.01)
