"""The sums of a Gaussian likelihood with differential privacy of its rows, and what they say.

Rows are divided by the noise scale at the program's start. Client k sends, once,

    u_i   (x_i / R, y_i / B), x_i the coefficients of row i, y_i its response; shortened to
          |u_i|^2 <= 2, response and all, so that y_i = x_i . l + e_i holds of what is left
    M~    sum_i u_i u_i' + E,  E symmetric Gaussian of sd t on its diagonal and t / sqrt(2) off it

If one row is replaced, the sum moves by sqrt(8) at most in the Frobenius norm,
|u u' - v v'|^2 = |u|^4 + |v|^4 - 2 (u . v)^2 <= 8, so M~ is one Gaussian mechanism with t = sqrt(8) z.

Let A, b and q be R^2, R B and B^2 times the blocks of M~; A without negative eigenvalues. At noise
scale g, and with L(l, C) the belief of what any client's l may be,

    b | l    ~ Normal(A l, g^2 A + s^2 I),    s^2 = R^2 t^2 / 2 (B^2 + (1 + 1/L) R^2 E|l|^2),
               as the noise of A counts l times
    q        = r + b' A^-1 b + noise, the r left over being g^2 chi^2 of n minus as many degrees of
               freedom as b determines; r is integrated out by quadrature, and b' A^-1 b given b~
               and the belief has the mean and variance of a Gaussian b

Without noise both are exact, whatever the belief. With noise A and the belief are plugged in; the
belief comes from the posterior itself, in a few passes at the server, from the noisy sums alone.

Sources: perturbed sufficient statistics, Foulds et al. 2016 (UAI); noise as part of the likelihood,
Bernstein and Sheldon 2019 (NeurIPS); b given the noisy A, Alparslan et al. 2023 (ICML),
arXiv:2301.13778. That q is used, and how, and the belief, are hierfl's choice.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import Factor, dot, rounded, times
from hierfl.core.secret_noise import normals_at
from hierfl.laplace.trials import moved_rows, trial
from hierfl.program.program import ProgramError
from hierfl.summaries.exact import Spread
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.packed_rows import PackedRows, packed
from hierfl.summaries.reading import gauss_hermite, node_at_mean
from hierfl.summaries.row_noise import RowNoise
from hierfl.summaries.units import UnitScore

LONGEST = 2.0  # |u|^2 of a row
NODES = 16  # of the quadrature over r
LEAST_DEGREES = 0.5  # of r, where a client has hardly more rows than coefficients
SHORTENED = 0.03  # sd of the share of a constant column that shortened rows may lack
QUANTILES, TINY = 64, 1e-6  # of a truncated Normal; second moments relative to R^2 that are none
WIDE = 1e6  # in variances of the noise, of what is not known
EQUAL = 1e-6  # relative differences of rows' scales that are rounding


@dataclass(frozen=True, eq=False)
class NoisySums:
    """How noisy the sums of a Gaussian likelihood are, and what they say in spite of it."""

    spread: Spread
    sd: float  # t
    row: float  # R, at the starting scale
    response: float  # B, likewise
    key: str  # of the noise
    constant: Tensor  # (L,) a coefficient that is the same in every row, such as 1; else 0

    def block(self, matrix: Tensor) -> Tensor:
        """Return the block (N, L, L) of matrices (N, V, V) that belongs to l."""
        inside = self.spread.line.inside
        return matrix[:, inside][:, :, inside]

    def whole(self, block: Tensor) -> Tensor:
        """Return matrices (N, V, V) of blocks (N, L, L), zeros elsewhere."""
        inside, size = self.spread.line.inside, self.spread.line.reading.size
        at = (inside[:, None] * size + inside).flatten()
        placed = block.new_zeros(len(block), size * size)
        return placed.index_copy(1, at, block.flatten(1)).view(-1, size, size)

    def noise_of_entries(self, count: Tensor) -> Tensor:
        """Return the variance of the noise of the entries of A / n, (N, L, L)."""
        size = len(self.spread.line.inside)
        variances = 0.5 * (torch.ones(size, size) + torch.eye(size)).to(count)
        return (self.row**2 * self.sd / count.clamp(min=1.0))[:, None, None] ** 2 * variances

    # ------------------------------------------------------------------------------ the design
    def designs(self, factors: Factors) -> "Designs":
        """Return mean and variance of A / n over clients, from noisy ones: DerSimonian and Laird."""
        count, noisy = _rows_of(factors), self.block(factors.precision)
        some = count > 0.0
        count, noise = count[some], self.noise_of_entries(count[some])
        means = noisy[some] / count[:, None, None]
        weight = 1.0 / noise
        mean = (weight * means).sum(0) / weight.sum(0)
        spare = weight.sum(0) - weight.square().sum(0) / weight.sum(0)
        found = ((weight * (means - mean).square()).sum(0) - (len(means) - 1)) / spare
        between = (found - self.by_chance(mean[None], count).mean(0)).clamp(min=0.0)
        if len(means) == 1:  # nothing to learn it from
            between = torch.full_like(mean, WIDE) * noise[0]
        constant = self.constant[:, None] * self.constant
        between = torch.where(constant == 0.0, between, 0.0)
        sure = torch.where(constant == 0.0, 0.0, (SHORTENED * constant) ** -2)
        for _ in range(2):
            weight = 1.0 / (between + self.by_chance(mean[None], count) + noise)
            whole = weight.sum(0) + sure
            found = ((weight * means).sum(0) + sure * constant) / whole
            designs = Designs(found, between, 1.0 / whole, self.row**2)
            mean = designs.drawn(None)
        return designs

    def by_chance(self, mean: Tensor, count: Tensor) -> Tensor:
        """Return the variance of entries of A / n for Normal x with second moments (N, L, L)."""
        diagonal, constant = mean.diagonal(dim1=-2, dim2=-1), self.constant.to(mean)
        product = constant[:, None] * constant
        variance = diagonal[..., None] * diagonal[..., None, :] + mean.square()
        variance = variance / count.clamp(min=1.0)[:, None, None]
        return torch.where(product == 0.0, variance, (SHORTENED * product) ** 2)

    def given_design(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the entries of A given its noisy one, (N, L, L) both."""
        belief, count = factors.belief, _rows_of(factors)[:, None, None]
        assert belief is not None
        mean = self.block(belief["design"])
        own = self.block(belief["between"]) + self.by_chance(mean, count[:, 0, 0])
        noise = self.noise_of_entries(count[:, 0, 0])
        share = own / (own + noise)
        a = count * mean + share * (self.block(factors.precision) - count * mean)
        return a, count.square() * share * noise

    # ------------------------------------------------------------------------------ what sums say
    def at(self, factors: Factors, scale: Tensor) -> tuple[Factors, Tensor]:
        """Return the factors at noise scale g (), and log constants (N,)."""
        inside, belief = self.spread.line.inside, factors.belief
        assert belief is not None
        a, unsure = self.given_design(factors)
        b, loc = factors.shift[:, inside], belief["mean"][:, inside]
        within, common = self.block(belief["within"]), self.block(belief["common"])
        second = loc.square() + (within + common).diagonal(dim1=-2, dim2=-1)
        of_b = 0.5 * (self.row * self.response * self.sd) ** 2
        noise = of_b + times(unsure, second)  # (N, L)
        root = noise.sqrt()
        values, vectors = torch.linalg.eigh(a / (root[:, :, None] * root[:, None]))
        values = values.clamp(min=0.0)
        total = scale.square() * values + 1.0
        along = (vectors.mT @ (b / root)[..., None])[..., 0]
        outer = root[..., None] * vectors
        precision = (outer * (values.square() / total)[:, None]) @ outer.mT
        shift = (outer @ (values / total * along)[..., None])[..., 0]
        constant = -0.5 * (total.log() + along.square() / total).sum(-1)
        here = replace(
            factors,
            precision=self.whole(precision),
            shift=torch.zeros_like(factors.shift).index_copy(1, inside, shift),
        )
        if factors.noisy_square is not None and len(self.spread.line.rest):
            a = (outer * values[:, None]) @ outer.mT
            sums = _Known(a, unsure, b, noise, loc, within, common)
            constant = constant + self._of_square(factors, sums, scale)
        return here, constant

    def _of_square(self, factors: Factors, sums: "_Known", scale: Tensor) -> Tensor:
        """Return the log density of q given b at noise scale g (), (N,)."""
        a, unsure, b, noise, loc, within, common = sums
        power, count = scale.square(), _rows_of(factors)
        eye = torch.eye(a.shape[-1], dtype=a.dtype)
        k = torch.linalg.inv_ex(a @ within @ a + torch.diag_embed(noise) + power * a).inverse
        gain = within @ a @ k + power * k
        mean = loc + times(gain, b - times(a, loc))  # A^-1 E[b | b~]
        missed = eye - gain @ a  # how far it moves with `loc`
        own = within @ a @ k * noise[:, None]
        shared = common @ missed.mT @ a @ missed
        explained = dot(mean, times(a, mean)) + _trace(own) + _trace(shared)
        degrees = count - a.shape[-1] + dot(k.diagonal(dim1=-2, dim2=-1), noise)
        weighted, square = noise * mean, mean.square()
        of_b = 4.0 * (dot(weighted, mean) - dot(weighted, times(k, weighted))).clamp(min=0.0)
        of_b = of_b + 2.0 * _trace(own @ own)
        # an entry off the diagonal counts twice: half of each is in either triangle
        of_a = 2.0 * dot(square, times(unsure, square))
        of_a = of_a - dot(unsure.diagonal(dim1=-2, dim2=-1), square.square())
        turned = times(missed.mT @ a, mean)
        in_common = 4.0 * dot(turned, times(common, turned)) + 2.0 * _trace(shared @ shared)
        # what all clients err by in common does not average out: its variance counts N times
        in_common = in_common * (count > 0.0).sum()
        variance = self.sd**2 * self.response**4 + of_a + of_b + in_common
        assert factors.noisy_square is not None
        degrees = degrees.clamp(min=LEAST_DEGREES)
        density = log_of_sum(factors.noisy_square - explained, degrees, scale, variance)
        return torch.where(count > 0.0, density, 0.0)


class _Known(NamedTuple):
    """What is known of N clients' sums beside q."""

    a: Tensor  # (N, L, L) A, without negative eigenvalues
    unsure: Tensor  # (N, L, L) the variance of its entries
    b: Tensor  # (N, L)
    noise: Tensor  # (N, L) the variance of b given A, l and the rows' own noise
    loc: Tensor  # (N, L) mean of l
    within: Tensor  # (N, L, L) its covariance at a client
    common: Tensor  # (N, L, L) and that of its mean, which is the same for all clients


class Designs(NamedTuple):
    """What is known of A / n of any client, (L, L) each."""

    found: Tensor  # the mean
    between: Tensor  # variance of its entries between clients, beyond that by chance
    variance: Tensor  # of `found`
    most: float  # R^2, the largest second moment of a column

    def error(self) -> float:
        """Return the largest relative error of a column's second moment."""
        size = self.drawn(None).diagonal()
        return float((self.variance.diagonal().sqrt() / size).max())

    def drawn(self, g: torch.Generator | None) -> Tensor:
        """Return a draw of the mean, without negative eigenvalues; None: what is expected."""
        sd, size = self.variance.sqrt(), len(self.found)
        u = (torch.arange(QUANTILES) + 0.5)[:, None].expand(-1, size) / QUANTILES
        e = torch.zeros(size, size)
        if g is not None:
            u = torch.rand(1, size, generator=g)
            e = torch.randn(size, size, generator=g).triu(1)
        at, by = self.found.diagonal(), sd.diagonal()
        low, high = (torch.special.ndtr((end - at) / by) for end in (0.0, self.most))
        normal = torch.special.ndtri((low + u * (high - low)).clamp(1e-12, 1.0 - 1e-12))
        diagonal = (at + by * normal).clamp(TINY * self.most, self.most).mean(0)
        root = diagonal.sqrt()
        correlations = (self.found + sd * (e + e.mT)) / (root[:, None] * root)
        correlations = correlations - torch.diag(correlations.diagonal())
        # correlations, shrunk together until they are ones of some design
        least = -float(torch.linalg.eigvalsh(correlations)[0])
        correlations = correlations * min(1.0, (1.0 - TINY) / max(least, TINY))
        return (correlations + torch.eye(size)) * root[:, None] * root


def _trace(matrix: Tensor) -> Tensor:
    """Return the traces of matrices (N, L, L), (N,)."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _rows_of(factors: Factors) -> Tensor:
    """Return the number of rows of each client, (N,)."""
    assert factors.num_rows is not None
    return factors.num_rows


def log_of_sum(value: Tensor, degrees: Tensor, scale: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of scale^2 chi^2 of some degrees of freedom plus Gaussian noise, (N,).

    It is the integral of Gamma(r) Normal(value; r, variance) over log r, by Gauss-Hermite nodes
    about its mode.
    """
    nodes, weights = gauss_hermite(NODES, value.dtype)
    rate = 0.5 / scale.square()
    c = value - variance * rate
    root = (c.square() + 2.0 * degrees * variance).sqrt()
    # the mode solves r^2 - c r = degrees variance / 2; no digits cancel
    mode = torch.where(c > 0.0, 0.5 * (c + root), degrees * variance / (root - c))
    width = (0.5 * degrees + mode.square() / variance).rsqrt()
    x = mode.log()[..., None] + width[..., None] * nodes
    r, half = x.exp(), 0.5 * degrees[..., None]
    density = half * (x + rate.log()) - rate * r - torch.lgamma(half)
    density = density - 0.5 * (value[..., None] - r).square() / variance[..., None]
    total = (density + 0.5 * nodes.square() + weights.log()).logsumexp(-1)
    return total + width.log() - 0.5 * variance.log()


def noise_of(score: UnitScore, spread: Spread | None, how: RowNoise) -> NoisySums | None:
    """Return how noisy the sums of a program are; None: its likelihood is not Gaussian.

    Refuse a bound of responses where it is not needed, and its lack where it is.
    """
    constant = None if spread is None else _constants(score, spread)
    if spread is None or constant is None:
        if how.max_response is not None:
            raise ProgramError(
                "max_response bounds the responses of a Gaussian likelihood of one linear predictor "
                "a row, with a noise scale that is the same for all rows, and the program's is "
                "none: leave it out"
            )
        return None
    if how.max_response is None:
        raise ProgramError(
            "the likelihood is Gaussian, so that clients send sums of their rows and responses, and "
            "a budget needs a bound of the responses: give RowNoise(..., max_response=); of "
            "standardized responses about 3"
        )
    first = float(spread.first)
    sd = math.sqrt(2.0) * LONGEST * how.noise
    bounds = how.max_row_norm / first, how.max_response / first
    return NoisySums(spread, sd, *bounds, how.key, constant / first)


def _constants(score: UnitScore, spread: Spread) -> Tensor | None:
    """Return the coefficients that all made-up rows share, (L,), others 0.

    None: rows have several linear predictors, or other noise scales.
    """
    if not score.by_row:
        return None
    with trial():
        rows = packed(score, moved_rows(score.reading.program, torch.Generator().manual_seed(0)))
        if rows.design.shape[1] != 1:
            return None
        curvature = _by_row(rows)[1] * spread.first.square()
        if not bool(((curvature - 1.0).abs() < EQUAL).all()):
            return None
        x = rows.design[:, 0]
        return torch.where(((x - x[0]).abs() < EQUAL).all(0), x[0], 0.0)


def _by_row(rows: PackedRows) -> tuple[Tensor, Tensor]:
    """Return the slope in each row's predictor at l = 0 and the starting scale, and the curvature, (n,)."""
    line, start = rows.line, rows.score.start
    zero = start.index_fill(0, line.inside, 0.0).expand(rows.clients, -1)
    eye = torch.eye(len(start)).expand(rows.clients, -1, -1)
    slope, second = rows.by_predictor(zero, eye, node_at_mean(line))
    return slope[:, 0], -second[:, 0]


def noisy_sums(
    rows: PackedRows, counts: Tensor, noisy: NoisySums, keys: Tensor
) -> dict[str, Tensor]:
    """Return clients' sums with noise, by `keys` (C, 2)."""
    if not rows.score.by_row or rows.design.shape[1] != 1:
        raise ProgramError("row_noise needs one linear predictor a row: observe one site a row")
    slope, curvature = _by_row(rows)
    weight = curvature.sqrt()[:, None]  # one over the row's noise scale
    x, y = rows.design[:, 0] * weight, slope[:, None] / weight
    u = torch.cat([x / noisy.row, y / noisy.response], 1)
    # a row that overflows must not show in a sum that is not finite
    u = torch.where(u.isfinite().all(1, keepdim=True), u, 0.0)
    length = u.norm(dim=1, keepdim=True)
    u = u * (math.sqrt(LONGEST) / length.clamp(min=math.sqrt(LONGEST)))
    u = torch.where(u.isfinite(), u, 0.0)
    size = u.shape[1]
    drawn = normals_at(keys, size * size, noisy.key).to(u)
    square = drawn.view(-1, size, size)
    total = rows.by_client(u[:, :, None] * u[:, None]) + 0.5 * noisy.sd * (square + square.mT)
    inside, width = rows.line.inside, len(rows.score.start)
    shift = torch.zeros(rows.clients, width)
    shift = shift.index_copy(1, inside, noisy.row * noisy.response * total[:, :-1, -1])
    precision = noisy.whole(noisy.row**2 * total[:, :-1, :-1])
    precision, shift, _ = rounded(Factor(precision, shift, torch.zeros(rows.clients)))
    square = noisy.response**2 * total[:, -1, -1]
    sums = {"precision": precision, "shift": shift, "noisy_square": square}
    return {**sums, "num_rows": counts.to(shift)}
