"""A client's likelihood as a Gaussian factor, found by variational steps on the client's own rows.

The server sends its belief about any client's v, Normal(m, C). With it, q is the Normal
distribution closest to Normal(v; m, C) p(y | v) (in KL(q || .)), and the factor is what the
likelihood contributes to q:

    exp(eta . v - v' Lambda v / 2)
    Lambda = -E_q[d^2 log p(y | v)],    eta = E_q[d log p(y | v)] + Lambda E_q[v]

It is exact where the likelihood is Gaussian. Natural parameters allow a singular Lambda (a client
with one row, a column that never varies).

Source: conjugate-computation variational inference, Khan and Lin 2017, arXiv:1703.04265.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from hierfl.laplace.mode import CAP, newton_step
from hierfl.summaries.expectations import Expected, Nodes, Rows

CLIMB, SETTLE = 12, 30  # Newton steps to the mode, and variational steps from there
LARGEST = 1e12  # of an expected curvature, relative to that at the mean: above, q is far too wide
GRID, LEAST = 2.0**-32, 2.0**-5  # of rounding, and the least unit relative to the largest
NOTHING = 1e-100  # the unit of a factor that is 0; its square has to be a number
RATE = 0.3  # of a variational step: whole steps run away where labels are rare


class Factor(NamedTuple):
    """The Gaussian factor of a client's likelihood.

    precision: (V, V) Lambda, without negative eigenvalues.
    shift: (V,) eta.
    raised: () how many eigenvalues of Lambda were negative, and are 0 instead.
    """

    precision: Tensor
    shift: Tensor
    raised: Tensor

    def log(self, v: Tensor) -> Tensor:
        """Return the log of the factor at v (V,), ()."""
        return self.shift @ v - 0.5 * v @ self.precision @ v


def factor_of(rows: Rows, loc: Tensor, covariance: Tensor, nodes: Nodes) -> Factor:
    """Return the factor of a client's likelihood, given the server's belief: m and C."""
    prior = torch.linalg.inv_ex(covariance).inverse
    prior = 0.5 * (prior + prior.mT)
    mean = _mode(rows, loc, prior)
    precision = prior + _positive(rows.at_mean(mean, prior).curvature)[0]
    for _ in range(SETTLE):
        slope, curvature = _expected(rows, mean, precision, nodes)
        precision = (1.0 - RATE) * precision + RATE * (prior + _positive(curvature)[0])
        step = newton_step(slope - prior @ (mean - loc), precision, cap=CAP)
        mean = mean + RATE * step
    slope, curvature = _expected(rows, mean, precision, nodes)
    curvature, raised = _positive(curvature)
    return Factor(curvature, slope + curvature @ mean, raised)


def _expected(rows: Rows, mean: Tensor, precision: Tensor, nodes: Nodes) -> Expected:
    """Return expectations under q, or the derivatives at its mean if expectations overflow.

    A power of time overflows at the far nodes of a wide prior of a Weibull shape. Each step narrows
    q.
    """
    found, there = rows.expected(mean, precision, nodes)
    most = LARGEST * (1.0 + there.curvature.abs().amax())
    # a comparison with NaN is false
    usable = (found.curvature.abs() <= most).all() & (found.slope.abs() <= most).all()
    slope = torch.where(usable, found.slope, there.slope)
    return Expected(slope, torch.where(usable, found.curvature, there.curvature))


def rounded(factor: Factor) -> Factor:
    """Return a factor in double precision, rounded to about 32 binary digits.

    The server's chains amplify rounding. What clients send differs between engines by the last few
    of 53 digits, and must not lead to other draws. Entries are rounded in units of the square roots
    of the precision's diagonal, because entries near 0 differ in all of their digits.
    """
    size = factor.precision.diagonal().abs().sqrt()
    size = size.maximum(LEAST * size.amax()).clamp(min=NOTHING)
    each = size.log2().floor().exp2()
    whole = (factor.shift / each).abs().amax().clamp(min=1.0).log2().floor().exp2()
    return Factor(
        _on_grid(factor.precision, each[:, None] * each * GRID),
        _on_grid(factor.shift, whole * each * GRID),
        factor.raised,
    )


def _on_grid(value: Tensor, unit: Tensor) -> Tensor:
    return (value / unit).round() * unit


def _mode(rows: Rows, loc: Tensor, prior: Tensor) -> Tensor:
    """Climb to the mode of Normal(v; loc, prior^-1) p(y | v) by Newton steps, halved if better."""
    shares = torch.tensor([1.0, 0.5, 0.25, 0.0625], dtype=loc.dtype)

    def density(v: Tensor) -> Tensor:
        return rows.log_likelihood(v) - 0.5 * (v - loc) @ prior @ (v - loc)

    mean = loc
    for _ in range(CLIMB):
        curvature = _positive(rows.at_mean(mean, prior).curvature)[0]
        step = newton_step(grad(density)(mean), curvature + prior, cap=CAP)
        tried = torch.vmap(lambda by, mean=mean, step=step: density(mean + by * step))(shares)
        mean = mean + shares[tried.nan_to_num(nan=-torch.inf).argmax(0)] * step
    return mean


def _positive(curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Return a curvature with its negative eigenvalues set to 0, and how many there were."""
    values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    floor = 1e-6 * values.abs().amax()
    return (vectors * values.clamp(min=0.0)) @ vectors.mT, (values < -floor).sum().to(values.dtype)
