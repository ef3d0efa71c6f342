"""Transforms (`scale`, `bs`, `poly`, `s`, ...) whose constants come from counts and sums of all clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from scipy.interpolate import BSpline, CubicSpline
from torch import Tensor

from hierfl.core.typed_json import Spread, Value
from hierfl.core.user_warnings import warn

Values = NDArray[np.float64]

SMOOTHS = ("s", "gp")
FLOOR = 1e-8  # of a sine's share of the variance: short waves keep a density
FAR = 0.1  # of the range of its knots, beyond which a spline is warned of
# Edges of the bins of values, in sds from the mean: quantiles are found to a fraction of a bin.
EDGES = np.linspace(-6.0, 6.0, 241)


class BeyondKnots(UserWarning):
    """A row lies far outside of the knots of a spline."""


@dataclass(frozen=True)
class Constants:
    """What clients agree on about one transform's argument; sd has n in the denominator.

    `knots` are those of `scipy.interpolate.BSpline`; row j of `polynomials` has the coefficients of
    degree j + 1 in (x - mean) / sd, lowest power first. Of `s(x)` each knot stands once; `gp(x)` has
    the ends of its range, its number of sines as `degree`, and ends `boundary` from the middle.
    """

    mean: Value
    sd: Spread
    knots: tuple[Value, ...] = ()
    degree: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    polynomials: tuple[tuple[Value, ...], ...] = ()
    boundary: Spread = 0.0

    def __call__(self, name: str, text: str, x: Any, *, by: Any = None) -> Values:
        """Apply a named call to values, (n,) -> (n,), or (n, columns) of `bs` and `poly`."""
        values = np.asarray(x, dtype=np.float64)
        if name == "center":
            return values - self.mean
        if name == "bs":
            knots = np.array(self.knots)
            basis = BSpline.design_matrix(values, knots, self.degree, extrapolate=True)
            # All columns sum to one, as the intercept: the first is dropped, as in R.
            dense: Values = basis.toarray()[:, 1:]
            return dense
        if name in SMOOTHS:
            return smooth_columns(self, name, text, values, by)
        scaled = (values - self.mean) / self.sd
        if name == "poly":
            powers = scaled[:, None] ** np.arange(self.degree + 1)
            columns: Values = powers @ np.array(self.polynomials).T
            return columns
        return scaled


def warn_far(text: str, values: Values, knots: Sequence[float], client: str) -> None:
    """Warn of a client's values far outside of the knots of a spline."""
    low, high = knots[0], knots[-1]
    far = np.maximum(low - values, values - high) > FAR * (high - low)
    if count := int(far.sum()):
        what = (
            f"'{text}' of client '{client}' has {count} value{'s' if count > 1 else ''} far outside"
        )
        knots_are = f"its knots, which are from {low:.4g} to {high:.4g}"
        warn(f"{what} {knots_are}: the spline is unreliable there", BeyondKnots)


def counted(values: Values, mean: float, sd: float, least: int) -> tuple[int, ...]:
    """Return how many values lie at or below each of `EDGES`, rounded down to multiples of `least`."""
    below = np.searchsorted(np.sort((values - mean) / sd), EDGES, side="right")
    return tuple(int(n) for n in least * (below // least))


def powers(values: Values, mean: float, sd: float, degree: int) -> tuple[float, ...]:
    """Return the sums of the powers 0 to 2 `degree` of the standardized values."""
    scaled = (values - mean) / sd
    return tuple(float((scaled**j).sum()) for j in range(2 * degree + 1))


def spline_of(
    name: str, mean: float, sd: float, total: Values, options: Mapping[str, Any]
) -> Constants:
    """Return the knots of the `bs` call `name`, at quantiles of the counts of all clients."""
    degree, df = options["degree"], options["df"]
    at = mean + sd * EDGES
    inside = np.flatnonzero((total > 0) & (total < total[-1]))
    ends = (at[max(inside[0] - 1, 0)], at[inside[-1] + 1]) if len(inside) else (at[0], at[-1])
    low, high = (
        end if options[bound] is None else options[bound]
        for bound, end in zip(("lower_bound", "upper_bound"), ends, strict=True)
    )
    ranks = np.linspace(0, 1, df - degree + 2)[1:-1] * total[-1]
    inner = np.interp(ranks, total, at)
    if not low < high or np.any(inner <= low) or np.any(inner >= high):
        what = f"knots {inner.round(4).tolist()} that are not between its bounds {low:.4g} and"
        fix = "give lower_bound and upper_bound around them"
        raise ValueError(f"'{name}' has {what} {high:.4g}: {fix}")
    knots = np.concatenate([[low] * (degree + 1), inner, [high] * (degree + 1)])
    return Constants(mean, sd, tuple(map(float, knots)), degree)


def polynomials_of(
    name: str, mean: float, sd: float, sums_of_powers: Sequence[Sequence[float]], degree: int
) -> Constants:
    """Return the polynomials of the `poly` call `name`: R's `poly` times sqrt(n), of sd 1.

    Inverse Cholesky factor of the moments E[u^(i + j)]: Golub and Welsch 1969, doi:10.2307/2004418.
    """
    total = np.sum(np.array(sums_of_powers), axis=0)
    average = total / total[0]
    hankel = average[np.add.outer(np.arange(degree + 1), np.arange(degree + 1))]
    try:
        lower = np.linalg.cholesky(hankel)
        rows = np.tril(np.linalg.inv(lower))[1:]  # whose rounding errors above are not 0
    except np.linalg.LinAlgError as error:
        what = f"'{name}' has too few different values for degree {degree}"
        raise ValueError(f"{what}: lower the degree") from error
    return Constants(mean, sd, (), degree, tuple(tuple(map(float, row)) for row in rows))


# ------------------------------------------------------------ smooths
@dataclass(frozen=True)
class Smooth:
    """What shares a scale: `size` coefficients for each of the `levels` of `by`, or of one curve, ()."""

    kind: str
    size: int
    levels: tuple[str, ...]
    constants: Constants
    has_by: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """What its scales are called: brms's names."""
        return ("sds",) if self.kind == "s" else ("sdgp", "lscale")

    @property
    def step(self) -> float:
        """The frequency of the first sine."""
        return math.pi / (2.0 * self.constants.boundary)

    def shape(self, length: Tensor) -> Tensor:
        """Return the sds of sines (..., k) relative to that of the process, at length scales (...).

        Of exp(-(x - x')^2 / (2 length^2)), Riutort-Mayol et al. 2023, Statistics and Computing
        33:17, equations 9 and 13, with sines in place of sines / sqrt(L).
        """
        waves = self.step * torch.arange(1, self.size + 1, dtype=length.dtype)
        unit = math.sqrt(2.0 * math.pi) / self.constants.boundary
        part = unit * length[..., None] * torch.exp(-0.5 * (length[..., None] * waves) ** 2)
        return (part + FLOOR).sqrt()


def smooth_columns(constants: Constants, name: str, text: str, x: Values, by: Any = None) -> Values:
    """Return a smooth's columns, of `s` lines before curves: for each level of `by`, or times a numeric `by`."""
    if name == "gp":
        low, high = constants.knots
        far = abs(x - (low + high) / 2.0) >= constants.boundary
        if far.any():
            what = f"'{text}' is {x[far][0]:.6g} in row {int(far.argmax())}, where its sines end"
            fix = "leave the row out, or fit with a larger c="
            raise ValueError(f"{what}: they describe it from {low:.4g} to {high:.4g}; {fix}")
    free, curves = _free_and_shared(constants, name, x)
    if by is None:
        return np.concatenate([free, curves], 1)
    if not hasattr(by, "cat"):
        z = np.asarray(by, dtype=np.float64)[:, None]
        constant = z if name == "s" else z[:, :0]
        return np.concatenate([constant, z * free, z * curves], 1)
    member = np.eye(len(by.cat.categories))[by.cat.codes.to_numpy()]
    blocks = [(member[:, :, None] * part[:, None]).reshape(len(x), -1) for part in (free, curves)]
    return np.concatenate(blocks, 1)


def _free_and_shared(constants: Constants, name: str, x: Values) -> tuple[Values, Values]:
    """Return the columns with priors of their own, and those that share a scale."""
    if name == "s":
        line = ((x - constants.mean) / constants.sd)[:, None]
        return line, natural_curves(constants.knots, x)
    from_end = x - sum(constants.knots) / 2.0 + constants.boundary
    waves = np.arange(1, constants.degree + 1) * math.pi / (2.0 * constants.boundary)
    return np.zeros((len(x), 0)), np.sin(from_end[:, None] * waves)


# ------------------------------------------------------------ natural cubic splines
def natural_curves(knots: Sequence[float], x: Values) -> Values:
    """Return k - 2 curves at x, (n, k - 2): natural cubic splines, straight beyond the knots.

    With coefficients u of sd 1 each, sum_j u_j curve_j has the density exp(-integral f''^2 / (2 v))
    among the splines whose values at the knots have neither a mean nor a trend; v makes the mean
    square over the knots 1.
    """
    spline, slopes = _natural(tuple(knots))
    inside = np.clip(x, knots[0], knots[-1])
    beyond = (x - inside)[:, None]
    curves: Values = spline(inside) + beyond * np.where(beyond < 0.0, slopes[0], slopes[1])
    return curves


@lru_cache(maxsize=64)
def _natural(knots: tuple[float, ...]) -> tuple[CubicSpline, Values]:
    """Return the curves as one spline, and their slopes at both ends.

    Green and Silverman 1994, chapter 2: integral f''^2 = g' Q R^-1 Q' g for values g at the knots.
    R and Q'Q have unique Cholesky factors, so that all clients have the same curves.
    """
    h = np.diff(knots)
    size = len(knots) - 2
    q = np.zeros((len(knots), size))
    r = np.zeros((size, size))
    for j in range(size):
        q[j : j + 3, j] = 1.0 / h[j], -1.0 / h[j] - 1.0 / h[j + 1], 1.0 / h[j + 1]
        r[j, j] = (h[j] + h[j + 1]) / 3.0
        if j + 1 < size:
            r[j, j + 1] = r[j + 1, j] = h[j + 1] / 6.0
    values = q @ np.linalg.solve(q.T @ q, np.linalg.cholesky(r))
    values /= math.sqrt((values**2).sum() / len(knots))
    spline = CubicSpline(knots, values, bc_type="natural")
    return spline, spline(np.array([knots[0], knots[-1]]), 1)


# ------------------------------------------------------------ what clients agree on
def smooth_of(
    call: Any, at: tuple[float, float], total: Values, options: Mapping[str, Any]
) -> Constants:
    """Return the constants of a smooth, from the counts of values below `EDGES` of all clients."""
    (mean, sd), size = at, options["k"]
    rows_between = np.diff(total, prepend=0.0)[1:]  # rows between two edges
    edges = mean + sd * EDGES
    filled = np.flatnonzero(rows_between > 0.0)
    if call.callee == "s" and len(filled) < size:
        fix = f"look for typos far from all others, or write s({call.args[0]}, k={max(3, len(filled))}), or C(...)"
        what = f"values in {len(filled)} places only, a place being 0.05 sd wide, and {size} knots"
        raise ValueError(f"'{call}' has {what}: {fix}")
    if not len(filled):
        what = "too few rows at each client for its range to be told"
        raise ValueError(f"'{call}' has {what}: lower min_count")
    low, high = float(edges[filled[0]]), float(edges[filled[-1] + 1])
    if call.callee == "gp":
        return Constants(mean, sd, (low, high), size, boundary=options["c"] * (high - low) / 2.0)
    for _ in range(100):  # no place has more than one knot, however many rows are there
        rows_between = np.minimum(rows_between, rows_between.sum() / size)
    below = np.concatenate([[0.0], rows_between.cumsum()])
    inner = np.interp(np.linspace(0.0, 1.0, size)[1:-1] * below[-1], below, edges)
    return Constants(mean, sd, (low, *map(float, inner), high))
