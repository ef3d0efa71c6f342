"""Transforms (`scale`, `bs`, `poly`, `s`, ...) whose constants come from counts and sums of all clients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import BSpline

Values = NDArray[np.float64]

# Transform -> what else it needs of its argument besides mean and sd.
STATEFUL = {"scale": "", "standardize": "", "center": "", "bs": "counts", "poly": "powers"}
STATEFUL |= {"s": "counts", "gp": "counts"}
SMOOTHS = ("s", "gp")
NUMPY = ("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh")
# Functions of numbers in formulas, besides the transforms above and formulae's C, S, T, I, offset.
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in NUMPY}
FUNCTIONS["np"] = SimpleNamespace(**FUNCTIONS)
CODINGS = ("C", "S", "T", "mo")
OTHERS = ("I", "cs", "offset")
# Call -> the options beside its column; the first may stand without its name.
OPTIONS = {
    "bs": ("df", "degree", "lower_bound", "upper_bound"),
    "poly": ("degree",),
    "s": ("k", "by", "bs"),
    "gp": ("k", "by", "c"),
    "S": ("omit",),
    "T": ("ref",),
}
# What other packages offer -> the nearest that is there.
NEAREST = {
    "t2": "s(x) of each",
    "te": "s(x) of each",
    "ti": "s(x) of each",
    "ns": "s(x), or bs(x, df=5)",
    "cr": "s(x)",
    "cc": "s(x)",
    "tp": "s(x)",
    "rcs": "s(x)",
    "hsgp": "gp(x)",
    "me": "a Pyro program with measurement error (docs/recipes.md)",
    "factor": "C(x)",
    "as.factor": "C(x)",
    "log2p": "log2(x + 1)",
    "B": "a column of 0 and 1",
    "binary": "a column of 0 and 1",
    "mi": "a Pyro program with latent values (docs/recipes.md)",
}
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

    mean: float
    sd: float
    knots: tuple[float, ...] = ()
    degree: int = 0
    polynomials: tuple[tuple[float, ...], ...] = ()
    boundary: float = 0.0

    def __call__(self, name: str, text: str, x: Any, *args: Any, **options: Any) -> Values:
        """Apply a named call to values, (n,) -> (n,), or (n, columns) of `bs` and `poly`."""
        values = np.asarray(x, dtype=np.float64)
        if name == "center":
            return values - self.mean
        if name == "bs":
            warn_far(text, values, self.knots[0], self.knots[-1])
            basis = BSpline.design_matrix(
                values, np.array(self.knots), self.degree, extrapolate=True
            )
            # All columns sum to one, as the intercept: the first is dropped, as in R.
            dense: Values = basis.toarray()[:, 1:]
            return dense
        if name in SMOOTHS:
            from hierfl.formulas.curves import columns as of_smooth

            return of_smooth(self, name, text, values, options.get("by"))
        scaled = (values - self.mean) / self.sd
        if name == "poly":
            powers = scaled[:, None] ** np.arange(self.degree + 1)
            columns: Values = powers @ np.array(self.polynomials).T
            return columns
        return scaled


def warn_far(text: str, values: Values, low: float, high: float) -> None:
    """Warn of a value far outside of the knots of a spline."""
    far = np.maximum(low - values, values - high) > FAR * (high - low)
    if far.any():
        warnings.warn(
            f"'{text}' is {values[far][0]:.6g} in row {int(far.argmax())}, far outside of "
            f"its knots from {low:.4g} to {high:.4g}: the spline means little there",
            BeyondKnots,
            stacklevel=3,
        )


@dataclass(frozen=True)
class Sums:
    """A client's count, sum and sum of squares of one argument."""

    count: int
    total: float
    squares: float


def sums(values: Values) -> Sums:
    """Return a client's count, sum and sum of squares."""
    return Sums(len(values), float(values.sum()), float((values**2).sum()))


def moments(parts: Sequence[Sums]) -> tuple[float, float]:
    """Return mean and sd over all clients, the sd with n in the denominator."""
    count, total, squares = 0, 0.0, 0.0
    for part in parts:
        count, total, squares = count + part.count, total + part.total, squares + part.squares
    mean = total / count
    variance = squares / count - mean**2
    # The rounding error of a difference of two large sums may exceed a small variance.
    rounding = 1e-14 * squares / count
    return mean, float(np.sqrt(variance)) if variance > 16 * rounding else 0.0


def counted(values: Values, mean: float, sd: float, least: int) -> tuple[int, ...]:
    """Return how many values lie at or below each of `EDGES`, rounded to multiples of `least`."""
    below = np.searchsorted(np.sort((values - mean) / sd), EDGES, side="right")
    return tuple(int(n) for n in least * np.rint(below / least))


def powers(values: Values, mean: float, sd: float, degree: int) -> tuple[float, ...]:
    """Return the sums of the powers 0 to 2 `degree` of the standardized values."""
    scaled = (values - mean) / sd
    return tuple(float((scaled**j).sum()) for j in range(2 * degree + 1))


def spline_of(
    name: str, mean: float, sd: float, counts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> Constants:
    """Return the knots of the `bs` call `name`, at quantiles of the counts of all clients."""
    degree, df = options.get("degree", 3), options.get("df")
    if not isinstance(degree, int) or degree < 0:
        raise ValueError(f"the degree of '{name}' is {degree!r}: it must be an integer, 0 or more")
    if not isinstance(df, int) or df < max(degree, 1):
        raise ValueError(
            f"'{name}' has df {df}: give the number of its columns, at least its degree {degree}"
        )
    total = np.sum(np.array(counts, dtype=np.float64), axis=0)
    at = mean + sd * EDGES
    found = np.flatnonzero((total > 0) & (total < total[-1]))
    ends = (at[max(found[0] - 1, 0)], at[found[-1] + 1]) if len(found) else (at[0], at[-1])
    low, high = options.get("lower_bound", ends[0]), options.get("upper_bound", ends[1])
    wanted = np.linspace(0, 1, df - degree + 2)[1:-1] * total[-1]
    inner = np.interp(wanted, total, at)
    if not low < high or np.any(inner <= low) or np.any(inner >= high):
        raise ValueError(
            f"'{name}' has knots {inner.round(4).tolist()} that are not between its bounds "
            f"{low:.4g} and {high:.4g}: give lower_bound and upper_bound around them"
        )
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
        rows = np.linalg.inv(lower)[1:]
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"'{name}' has too few different values for degree {degree}: lower the degree"
        ) from error
    return Constants(mean, sd, (), degree, tuple(tuple(map(float, row)) for row in rows))
