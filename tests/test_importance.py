"""Importance weights against ArviZ's, points against the moments of their distributions, and a precision made positive."""

from __future__ import annotations

from typing import Any

import arviz
import numpy as np
import pyro.distributions as dist
import pytest
import torch

from hierfl.ascent import positive
from hierfl.importance import normal_points, resampled, smoothed, student_log_prob, student_points
from tests.test_pvi import close


@pytest.mark.parametrize("tail", [0.3, 0.8, 1.5])
def test_smoothed_weights_are_arvizs(tail: float) -> None:
    ratios = tail * np.random.default_rng(0).standard_exponential(3000)
    weights = smoothed(torch.as_tensor(ratios))
    psislw: Any = arviz.psislw
    log, k_hat = psislw(ratios)
    assert weights.k_hat == pytest.approx(float(k_hat), abs=1e-10)
    assert np.allclose(weights.log.numpy(), np.asarray(log), atol=1e-10)


def test_points_have_the_moments_of_their_distribution() -> None:
    normal, heavy = normal_points(4096, 4), student_points(4096, 4, freedom=7.0)
    close(normal.T @ normal / 4096, torch.eye(4), 0.02)
    close(heavy.T @ heavy / 4096, 7 / 5 * torch.eye(4), 0.05)
    ratio = student_log_prob(heavy, torch.zeros(4), torch.eye(4), 7.0) - dist.StudentT(7.0).log_prob(heavy).sum(-1)
    assert ratio.std() > 0.0  # jointly t, not one by one
    one = student_log_prob(heavy[:, :1], torch.tensor([0.5]), torch.tensor([[2.0]]), 7.0)
    close(one, dist.StudentT(7.0, 0.5, 2.0).log_prob(heavy[:, 0]))
    assert torch.equal(normal, normal_points(4096, 4)) and not torch.equal(normal, normal_points(4096, 4, seed=1))


def test_resampling_keeps_shares() -> None:
    points = torch.arange(4.0)[:, None]
    drawn = resampled(points, torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), 1000)
    assert torch.bincount(drawn[:, 0].long()).tolist() == [100, 200, 300, 400]


def test_a_precision_is_made_positive_and_counted() -> None:
    precision, raised = positive(torch.diag(torch.tensor([-3.0, 0.5, 9.0])), torch.tensor([1.0, 2.0, 1.0]), fold=False)
    close(precision, torch.diag(torch.tensor([1.0, 4.0, 9.0])))
    assert float(raised) == 2.0
