"""The columns of smooth terms: natural cubic splines of `s(x)`, sines of `gp(x)`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.interpolate import CubicSpline

from hierfl.formulas.transforms import EDGES, Constants, Values, warn_far

S_SIZE, GP_SIZE, GP_BOUNDARY = 10, 20, 2.5  # k of s(x), as in mgcv; k and c of gp(x)
LEAST_SIZE = {"s": 3, "gp": 4}
# Scales between SHORT c S / k and LONG (c - 1) S, of a half range S, at which sines give a Gaussian
# process with its covariance within 1.5 % of the variance, beside an intercept.
SHORT, LONG = 1.75, 0.66


def columns(constants: Constants, name: str, text: str, x: Values, by: Any = None) -> Values:
    """Return the columns of a smooth: of `s` lines first, then curves; for each level of `by`.

    A numeric `by` multiplies the curve, the constant included.
    """
    if name == "gp":
        low, high = constants.knots
        far = abs(x - (low + high) / 2.0) >= constants.boundary
        if far.any():
            raise ValueError(
                f"'{text}' is {x[far][0]:.6g} in row {int(far.argmax())}, where its sines end: "
                f"they describe it from {low:.4g} to {high:.4g}; leave the row out, or fit with "
                "a larger c="
            )
    warn_far(text, x, *constants.knots[:: len(constants.knots) - 1])
    free, curves = _parts(constants, name, x)
    if by is None:
        return np.concatenate([free, curves], 1)
    if not hasattr(by, "cat") and not hasattr(by, "codes"):
        z = np.asarray(by, dtype=np.float64)[:, None]
        constant = z if name == "s" else z[:, :0]
        return np.concatenate([constant, z * free, z * curves], 1)
    codes = np.asarray(by.cat.codes if hasattr(by, "cat") else by.codes)
    levels = by.cat.categories if hasattr(by, "cat") else by.categories
    member = (codes[:, None] == np.arange(len(levels))).astype(np.float64)
    both = [(member[:, :, None] * part[:, None]).reshape(len(x), -1) for part in (free, curves)]
    return np.concatenate(both, 1)


def _parts(constants: Constants, name: str, x: Values) -> tuple[Values, Values]:
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
    found: Values = spline(inside) + beyond * np.where(beyond < 0.0, slopes[0], slopes[1])
    return found


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
    name: str, text: str, at: tuple[float, float], counts: Sequence[Sequence[int]], options: Any
) -> Constants:
    """Return the constants of a smooth, from the counts of values below `EDGES` of all clients."""
    mean, sd = at
    size = check_options(name, text, options)
    total = np.sum(np.array(counts, dtype=np.float64), axis=0)
    each = np.diff(total, prepend=0.0)[1:]  # rows between two edges
    edges = mean + sd * EDGES
    filled = np.flatnonzero(each > 0.0)
    if name == "s" and len(filled) < size:
        raise ValueError(
            f"'{text}' has values in {len(filled)} places only, a place being 0.05 sd wide, and "
            f"{size} knots: write s({text[2:-1].split(',')[0]}, k={max(3, len(filled))}), or C(...)"
        )
    if not len(filled):
        raise ValueError(
            f"'{text}' has too few rows at each client for its range to be told: lower min_count"
        )
    low, high = float(edges[filled[0]]), float(edges[filled[-1] + 1])
    if name == "gp":
        c = float(options.get("c", GP_BOUNDARY))
        return Constants(mean, sd, (low, high), size, boundary=c * (high - low) / 2.0)
    for _ in range(100):  # no place has more than one knot, however many rows are there
        each = np.minimum(each, each.sum() / size)
    below = np.concatenate([[0.0], each.cumsum()])
    inner = np.interp(np.linspace(0.0, 1.0, size)[1:-1] * below[-1], below, edges)
    return Constants(mean, sd, (low, *map(float, inner), high))


def check_options(name: str, text: str, options: Mapping[str, Any]) -> int:
    """Return k of a smooth; refuse options that it cannot have."""
    size = options.get("k", S_SIZE if name == "s" else GP_SIZE)
    if not isinstance(size, int) or size < LEAST_SIZE[name]:
        raise ValueError(
            f"'{text}' has k {size!r}: it must be an integer, {LEAST_SIZE[name]} or more"
        )
    if options.get("bs", "cr") != "cr":
        raise ValueError(
            f"'{text}' has the basis {options['bs']!r}: leave bs out, which is 'cr', or write "
            "s(x, hospital, bs='fs') for a curve of each hospital"
        )
    if name == "gp":
        c = options.get("c", GP_BOUNDARY)
        if not isinstance(c, int | float) or not c > 1.0:
            raise ValueError(f"'{text}' has c {c!r}: it must be a number above 1, such as 2.5")
        short, long = SHORT * c / size, LONG * (c - 1.0)
        if long < 1.25 * short:
            raise ValueError(
                f"'{text}' has too few sines: {size} of them with c {c:g} give length scales from "
                f"{short:.2g} to {long:.2g} times half the range; raise k, or take c=2.5"
            )
    return size
