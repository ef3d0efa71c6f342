"""The noise of each mechanism that hierfl draws, 10^5 numbers of it, is that of scipy: all of them are Gaussian."""

from functools import partial

import pytest
import torch
from scipy import stats
from torch import Tensor

from hierfl.core.secret_noise import new_key, normals_at, secret_normals
from hierfl.summaries.row_noise import RowNoise, _with_noise

COUNT = 100_000
EPSILONS = (0.5, 8.0)


def assert_normal(values: Tensor, sd: float = 1.0) -> None:
    """By Kolmogorov's test, the sd, and two tails: right noise fails once in a million runs."""
    noise = values.double().flatten().numpy() / sd
    assert len(noise) >= COUNT
    assert stats.kstest(noise, "norm").pvalue > 1e-7
    assert abs(noise.std() - 1.0) < 5.5 * (2.0 * len(noise)) ** -0.5
    for far in (-3.0, 3.0):
        beyond = int((noise * far > far * far).sum())
        assert stats.binomtest(beyond, len(noise), stats.norm.sf(3.0)).pvalue > 1e-7


def keys(count: int) -> Tensor:
    return torch.stack([torch.arange(count), torch.full((count,), 3)], 1).int()


@pytest.mark.parametrize("secret", [None, 7])
def test_noise_of_clients_together(secret: int | None) -> None:
    """As `differentially_private` draws it."""
    assert_normal(secret_normals(new_key(secret), COUNT))


@pytest.mark.slow("1")
@pytest.mark.parametrize("each", [1, 4, COUNT])
def test_noise_at_keys(each: int) -> None:
    """As row noise draws it: few numbers of each of many keys, or many of one."""
    assert_normal(normals_at(keys(COUNT // each), each, "ab" * 32))


@pytest.mark.slow("0.5")
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_noise_of_factors(epsilon: float) -> None:
    """Of sums beside which it is small, so that a factor shrinks by its variance alone."""
    how = RowNoise(epsilon=epsilon, delta=1e-5, max_row_norm=3.0, secret=1)
    size, large = 2, 1e9
    given = torch.zeros(size, dtype=torch.float64), large * torch.eye(size, dtype=torch.float64)
    about = torch.zeros(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)
    found = torch.vmap(partial(_with_noise, how, *given, *about))(keys(COUNT))
    precision, shift, _ = found
    sd = how.noise * 2.0 * how.max_slope * how.max_row_norm
    assert_normal(shift, sd)
    sd_entry = how.noise * how.max_curvature * how.max_row_norm**2
    assert_normal(precision[:, 0, 1], sd_entry)
    shrunk = sd**2 + sd_entry**2 * size  # eigenvalues, each by the variance of the noise
    assert_normal(precision.diagonal(dim1=1, dim2=2) - large + shrunk, sd_entry * 2.0**0.5)


def test_the_test_sees_other_noise() -> None:
    """A scale that is off by 2%, Laplace's, and noise on a coarse grid."""
    g = torch.Generator().manual_seed(0)
    normals = torch.randn(COUNT, generator=g, dtype=torch.float64)
    laplace = torch.distributions.Laplace(0.0, 0.5**0.5).icdf(torch.special.ndtr(normals))
    for wrong in (1.02 * normals, laplace, (normals * 8).round() / 8):
        with pytest.raises(AssertionError):
            assert_normal(wrong)
