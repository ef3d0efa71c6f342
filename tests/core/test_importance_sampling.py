"""Smoothed weights against ArviZ's, points by their moments, `positive`, and the proposal of scales."""

import importlib
import math
from typing import Any

import arviz
import numpy as np
import pyro.distributions as dist
import pytest
import torch

from hierfl.core.importance_sampling import (
    Split,
    fitted,
    heavy_points,
    normal_points,
    resampled,
    sides,
    smoothed,
)
from hierfl.core.process import double_precision
from hierfl.laplace.newton import positive
from hierfl.posterior.arviz_io import DATA_TREE
from tests.methods.test_pvi import close


@pytest.mark.parametrize("tail", [0.3, 0.8, 1.5])
def test_smoothed_weights_agree_with_arviz(tail: float) -> None:
    ratios = tail * np.random.default_rng(0).standard_exponential(3000)
    weights = smoothed(torch.as_tensor(ratios))
    # ArviZ 1 takes log likelihoods, the negative log ratios of leave-one-out, and another tail
    tolerance = 0.02 if DATA_TREE else 1e-10
    if DATA_TREE:
        stats: Any = importlib.import_module("arviz_stats.base").array_stats
        log, k_hat = stats.psislw(-ratios)
    else:
        psislw: Any = arviz.psislw
        log, k_hat = psislw(ratios)
    assert weights.k_hat == pytest.approx(float(k_hat), abs=tolerance)
    assert np.allclose(weights.log.numpy(), np.asarray(log), atol=tolerance)


def standard(size: int, *, right: float = 1.0, left: float = 1.0) -> Split:
    return Split(
        torch.zeros(size), torch.eye(size), torch.full((size,), right), torch.full((size,), left)
    )


def test_points_have_the_moments_of_their_distribution() -> None:
    normal = normal_points(4096, 4)
    heavy = standard(4).points(*heavy_points(4096, 4, freedom=7.0))
    close(normal.T @ normal / 4096, torch.eye(4), 0.02)
    close(heavy.T @ heavy / 4096, 7 / 5 * torch.eye(4), 0.05)
    assert torch.equal(normal, normal_points(4096, 4)) and not torch.equal(
        normal, normal_points(4096, 4, seed=1)
    )
    ratio = standard(4).log_prob(heavy, 7.0) - dist.StudentT(7.0).log_prob(heavy).sum(-1)
    assert ratio.std() > 0.0  # a multivariate t, not a product of univariate ones
    one = (
        standard(1)
        ._replace(loc=torch.tensor([0.5]), tril=torch.tensor([[2.0]]))
        .log_prob(heavy[:, :1], 7.0)
    )
    close(one, dist.StudentT(7.0, 0.5, 2.0).log_prob(heavy[:, 0]))


@pytest.mark.parametrize("freedom", [5.0, 15.0])
def test_split_points_follow_their_density(freedom: float) -> None:
    """Weighted by a normal density over their own, the points have the normal's moments and mean weight 1."""
    split = Split(
        torch.tensor([0.3, -0.2]),
        torch.tensor([[0.8, 0.0], [0.5, 1.2]]),
        torch.tensor([0.8, 2.0]),
        torch.tensor([2.5, 1.1]),
    )
    at = split.points(*heavy_points(16384, 2, freedom=freedom))
    target = dist.MultivariateNormal(
        torch.tensor([0.1, 0.0]), torch.tensor([[0.5, 0.1], [0.1, 0.9]])
    )
    weights = (target.log_prob(at) - split.log_prob(at, freedom)).exp()
    close(weights.mean(), 1.0, 0.01)
    close((weights[:, None] * at).mean(0), target.mean, 0.01)
    away = at - target.mean
    close((away * weights[:, None]).T @ away / len(at), target.covariance_matrix, 0.02)
    left = torch.linalg.solve_triangular(split.tril, (at - split.loc).T, upper=False).T < 0.0
    close(left.double().mean(0), split.left / (split.left + split.right), 0.01)


def test_a_refitted_split_has_the_requested_mean_and_covariance() -> None:
    loc, covariance = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 0.6], [0.6, 1.0]])
    split = Split(
        torch.zeros(2), torch.eye(2), torch.tensor([0.8, 2.0]), torch.tensor([2.5, 1.1])
    ).refitted(loc, covariance)
    normal, _ = heavy_points(65536, 2, freedom=5.0)
    at = split.points(normal, torch.ones(len(normal), 1))
    close(at.mean(0), loc, 0.01)
    close((at - loc).T @ (at - loc) / len(at), covariance, 0.02)
    close(split.left / split.right, [2.5 / 0.8, 1.1 / 2.0])


def test_sides_recover_the_scale_of_a_gaussian() -> None:
    fall = torch.tensor([4.5, 4.5 / 1.5**2, 100.0, 0.0, -1.0, torch.inf, torch.nan])
    close(sides(fall, 3.0), [1.0, 1.5, 0.7, 3.0, 3.0, 0.7, 1.0])


def test_resampling_repeats_points_in_proportion_to_their_weights() -> None:
    points = torch.arange(4.0)[:, None]
    drawn = resampled(points, torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), 1000)
    assert torch.bincount(drawn[:, 0].long()).tolist() == [100, 200, 300, 400]


def test_positive_raises_small_eigenvalues_and_counts_them() -> None:
    precision, raised = positive(
        torch.diag(torch.tensor([-3.0, 0.5, 9.0])), torch.tensor([1.0, 2.0, 1.0]), fold=False
    )
    close(precision, torch.diag(torch.tensor([1.0, 4.0, 9.0])))
    assert float(raised) == 2.0


def test_one_draw_with_all_of_the_weight_has_no_finite_k_hat() -> None:
    for far in (1e4, 800.0, 1e14):
        ratios = torch.zeros(400, dtype=torch.float64)
        ratios[7] = far
        found = smoothed(ratios)
        assert found.k_hat == float("inf") and found.effective < 1.01


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
