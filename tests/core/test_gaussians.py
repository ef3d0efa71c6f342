"""Products of Normal distributions and factors, against arithmetic of 50 digits."""

import math

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from hierfl.core.gaussians import (
    Normal,
    Quadratic,
    inverse,
    inverse_root,
    least_squares_solution,
    times_factor,
    turned_root,
    upper_root,
    without_own,
)

CLIENTS, SHARED = 3, 2


def test_least_squares_have_the_same_digits_whatever_memory_holds() -> None:
    """torch's default driver gave 37 different solutions of this system in 400 tries."""
    g = torch.Generator().manual_seed(0)
    root, of = (torch.randn(8, n, generator=g, dtype=torch.float64) for n in (8, 10))
    matrix, solutions = root @ root.mT, set()
    junk: list[Tensor] = []
    for i in range(100):
        junk = [*junk[-4 * (i % 5) :], torch.randn(i % 37 + 1), torch.full((8,), i)]
        solutions.add(least_squares_solution(matrix, of).numpy().tobytes())
    assert len(solutions) == 1
    torch.testing.assert_close(matrix @ least_squares_solution(matrix, of), of)
    assert bool(least_squares_solution(matrix * torch.nan, of).isnan().all())
    assert least_squares_solution(matrix, of[:, :0]).shape == (8, 0)


def exactly(prior: Tensor, precision: Tensor, shift: Tensor) -> tuple[list[float], float]:
    """Return the diagonal of the summed precision of (mean of w, u), and the constant."""
    size = prior.shape[-1]
    with mpmath.workdps(50):
        of_prior = mpmath.matrix(prior.tolist())
        total, constant = mpmath.matrix(size + SHARED, size + SHARED), mpmath.mpf(0)
        for one, pull in zip(precision.tolist(), shift.tolist(), strict=True):
            whole, at = mpmath.matrix(one), mpmath.matrix(pull)
            # w, u, and the mean of w: Normal(w; m, P^-1) exp(eta'v - v'Lambda v / 2)
            own = whole[:size, :size] + of_prior
            cross = -of_prior, whole[:size, size:]
            inverse = own**-1
            for i in range(2):
                for j in range(2):
                    block = -(cross[i].T * inverse * cross[j])
                    if i == j:
                        block += (of_prior, whole[size:, size:])[i]
                    for r in range(block.rows):
                        for c in range(block.cols):
                            total[i * size + r, j * size + c] += block[r, c]
            constant += (at[:size].T * inverse * at[:size])[0] / 2
            constant += (mpmath.log(mpmath.det(of_prior)) - mpmath.log(mpmath.det(own))) / 2
        return [float(total[i, i]) for i in range(size + SHARED)], float(constant)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sd", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("apart", [1.0, 1e-6])
def test_narrow_and_near_singular_priors_lose_no_digits(size: int, sd: float, apart: float) -> None:
    """The scales of rare draws: sds near 0, and correlations near 1 or -1."""
    g = torch.Generator().manual_seed(size)
    some = torch.randn(CLIENTS, size + SHARED, size + SHARED, generator=g, dtype=torch.float64)
    precision = some @ some.mT
    shift = torch.randn(CLIENTS, size + SHARED, generator=g, dtype=torch.float64)
    tril = torch.eye(size, dtype=torch.float64)
    for i in range(1, size):
        tril[i, i], tril[i, i - 1] = apart**0.5, -((1.0 - apart) ** 0.5)
    prior = torch.cholesky_inverse(sd * tril)
    diagonal, constant = exactly(prior, precision, shift)
    normal = Normal(
        torch.zeros(1, size), prior[None], prior.logdet()[None], is_diagonal=apart == 1.0
    )
    found = without_own(normal, precision, shift, summed=True)
    assert found.precision[0].diagonal().tolist() == pytest.approx(diagonal, rel=1e-3)
    assert float(found.constant) == pytest.approx(constant, abs=1e-3)


def test_densities_and_integrals_are_those_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    root = torch.randn(2, 3, 3, generator=g, dtype=torch.float64)
    precision = root @ root.mT + torch.eye(3, dtype=torch.float64)
    mean, x = torch.randn(2, 3, generator=g).double(), torch.randn(3, generator=g).double()
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=precision).log_prob(x)
    normal = Normal(mean, precision, torch.logdet(precision))
    torch.testing.assert_close(normal.log_prob(x), exact)
    shift = (precision @ mean[..., None])[..., 0]
    own = -0.5 * (mean * shift).sum(-1) + 0.3
    quadratic = Quadratic(precision, shift, own)
    value, center, upper = quadratic.normal()
    log_z = 1.5 * math.log(2.0 * math.pi) - 0.5 * torch.logdet(precision) + 0.3
    torch.testing.assert_close(value, log_z)
    torch.testing.assert_close(quadratic.log_integral(), log_z)
    torch.testing.assert_close(center, mean)
    torch.testing.assert_close(upper @ upper.mT, torch.linalg.inv(precision))


def test_a_narrow_prior_far_from_0_loses_no_digits() -> None:
    """Of one sd of 1e-8 about 3, m^2 / s^2 left 1 nat of noise in the integral."""
    prior = Normal(torch.tensor([[3.0]]), torch.tensor([[[1e16]]]), torch.tensor([math.log(1e16)]))
    factor = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]]), torch.tensor([[1.0, -0.5]])
    u = torch.tensor([0.7])
    of_w = times_factor(prior, u, *factor)
    v = torch.tensor([3.0, 0.7])
    at_mean = factor[1][0] @ v - 0.5 * v @ factor[0][0] @ v
    assert abs(float(of_w.log_integral()) - float(at_mean)) < 1e-9
    assert torch.allclose(of_w.center + of_w.shift / of_w.precision[:, 0], torch.tensor([[3.0]]))


def test_upper_roots_move_with_a_shift_of_a_column() -> None:
    g = torch.Generator().manual_seed(0)
    tril = torch.linalg.cholesky(torch.eye(3) + 0.5)
    shifted = torch.tensor([[1.0, -1000.0, 40.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1e3]])
    covariance, points = tril @ tril.mT, torch.randn(5, 3, generator=g)
    there = upper_root(shifted @ covariance @ shifted.mT)
    assert torch.allclose(points @ there.mT, points @ (shifted @ upper_root(covariance)).mT)
    assert torch.allclose(turned_root(tril), upper_root(covariance))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_an_inverse_root_is_the_upper_root_of_the_inverse(size: int) -> None:
    g = torch.Generator().manual_seed(size)
    half = torch.randn(5, size, size, generator=g, dtype=torch.float64)
    matrix = half @ half.mT + 0.1 * torch.eye(size, dtype=torch.float64)
    root, log_det = inverse_root(matrix)
    torch.testing.assert_close(root, upper_root(torch.linalg.inv(matrix)))
    torch.testing.assert_close(log_det, torch.logdet(matrix))
    torch.testing.assert_close(inverse(matrix)[0], torch.linalg.inv(matrix))
    # the last pivot is below 0, and nothing else
    matrix[2, -1, -1] -= 2.0 / inverse(matrix)[0][2, -1, -1]
    assert inverse_root(matrix)[1].isnan().tolist() == [False, False, True, False, False]
    assert bool(inverse(matrix)[0].isfinite().all())
