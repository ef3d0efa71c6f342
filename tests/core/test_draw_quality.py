"""Effective draws and Monte Carlo errors of weighted draws, entry by entry."""

import pytest
import torch
from torch import Tensor

from hierfl.core.draw_quality import distinct_of, quality_of

S = 4000


def normals(size: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(S, size, generator=g, dtype=torch.float64)


def test_independent_draws_of_equal_weight_are_all_effective() -> None:
    """The relative error of a Normal's sd is 1 / sqrt(2 S)."""
    found = quality_of(normals(3), torch.zeros(S))
    assert distinct_of(normals(3), torch.zeros(S)) > 0.99 * S
    assert found.effective.tolist() == pytest.approx([S] * 3)
    assert found.sd_error.tolist() == pytest.approx([(2 * S) ** -0.5] * 3, rel=0.05)
    # sqrt(p (1 - p) / S) over the density at the 5% point
    assert found.end_error.tolist() == pytest.approx([0.2179 / S**0.5 / 0.1031] * 3, rel=0.35)


def test_weights_that_ignore_an_entry_leave_it_their_effective_number() -> None:
    log_weights = normals(1)[:, 0].flip(0)
    expected = 1.0 / float(log_weights.softmax(0).square().sum())
    found = quality_of(normals(2), log_weights)
    assert found.effective.tolist() == pytest.approx([expected] * 2, rel=0.4)
    assert 1000 < distinct_of(normals(2), log_weights) < S


def test_errors_are_those_of_repeated_weighting() -> None:
    g = torch.Generator().manual_seed(1)
    sds, errors = [], []
    for _ in range(200):
        x = 1.5 * torch.randn(500, 1, generator=g, dtype=torch.float64)
        log_weights = -0.5 * x[:, 0].square() * (1.0 - 1.0 / 2.25)
        share = log_weights.softmax(0)
        sds.append(float((share @ (x - share @ x).square()).sqrt()))
        errors.append(float(quality_of(x, log_weights).sd_error))
    assert float(torch.tensor(sds).std()) == pytest.approx(sum(errors) / len(errors), rel=0.15)


def test_draws_that_have_collapsed_are_counted() -> None:
    """The draws of BUGS's Jaws: 2,000 within 1e-5 of each other, which single precision cannot tell."""
    values = 50.4644 + 1e-5 * normals(2) * torch.tensor([1.0, 0.5])
    assert distinct_of(values, torch.zeros(S)) < 100
    assert distinct_of(torch.cat([normals(1), 0.0 * normals(1)], 1), torch.zeros(S)) > 0.99 * S


def test_a_draw_far_out_shows_in_the_sd_alone() -> None:
    values = normals(2)
    values[0, 1] = 400.0
    found = quality_of(values, torch.zeros(S))
    assert found.sd_error[0] < 0.02 < 0.4 < found.sd_error[1]
    assert found.effective[1] == pytest.approx(S)


def test_constants_and_dependent_draws() -> None:
    """A number that does not move has no error; draws of chains count as so many as are effective."""
    values = normals(2)
    values[:, 0] = 1.0
    found, less = quality_of(values, torch.zeros(S)), quality_of(values, torch.zeros(S), 0.25)
    assert float(found.effective[0]) == float("inf") and float(found.sd_error[0]) == 0.0
    assert float(less.effective[1]) == pytest.approx(S / 4)
    assert float(less.sd_error[1] / found.sd_error[1]) == pytest.approx(2.0)


def test_an_end_is_known_by_the_spread_on_its_own_side() -> None:
    """A far tail does not make the other end look known: exp of a Normal's 5% and 95% points."""
    values = normals(1)
    plain, skewed = quality_of(values, torch.zeros(S)), quality_of(values.exp(), torch.zeros(S))
    assert float(skewed.end_error) == pytest.approx(1.645 * 5.18 / 4.18 * 0.0334, rel=0.3)
    assert float(quality_of((3.0 * values).exp(), torch.zeros(S)).end_error) < 0.3
    assert float(plain.end_error) == pytest.approx(0.0334, rel=0.35)
    assert float(plain.excess()) == pytest.approx(float(plain.end_error) / 0.2)
