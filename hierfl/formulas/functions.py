"""The functions that formulas know, and their options."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

SMOOTHS = ("s", "gp")
NUMPY = ("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh")
# Functions of numbers, besides transforms.
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in NUMPY}
FUNCTIONS["np"] = SimpleNamespace(**FUNCTIONS)
CODINGS = ("C", "S", "T", "mo")
OTHERS = ("I", "cs", "mi", "offset")


class Option(NamedTuple):
    """An option of a function: its default, and what it must be, a number of a kind between two ends."""

    default: Any
    kind: type = object
    low: float = -math.inf
    high: float = math.inf
    must_be: str = ""

    def allows(self, value: Any) -> bool:
        """Return whether the option may have a value."""
        if self.kind is object:
            return self.must_be == "" or value == self.default
        kinds = (int,) if self.kind is int else (int, float)
        return isinstance(value, kinds) and self.low <= value <= self.high


K_OF_GP, BOUNDARY = 20, 2.5  # k of gp(x), and how far its sines reach, in half ranges
# Function -> its options; the first may stand without its name.
OPTIONS: dict[str, dict[str, Option]] = {
    "bs": {
        "df": Option(0, int, 1, must_be="given, the number of columns"),
        "degree": Option(3, int, 0, must_be="an integer, 0 or more"),
        "lower_bound": Option(None, float, must_be="a number"),
        "upper_bound": Option(None, float, must_be="a number"),
    },
    "poly": {"degree": Option(1, int, 1, 6, must_be="an integer from 1 to 6")},
    "s": {
        "k": Option(10, int, 3, must_be="an integer, 3 or more"),
        "by": Option(None),
        "bs": Option("cr", must_be="'cr', or s(x, hospital, bs='fs') for a curve of each hospital"),
    },
    "gp": {
        "k": Option(K_OF_GP, int, 4, must_be="an integer, 4 or more"),
        "by": Option(None),
        "c": Option(BOUNDARY, float, math.nextafter(1.0, 2.0), must_be="a number above 1"),
    },
    "S": {"omit": Option(None)},
    "T": {"ref": Option(None)},
}
# Scales between SHORT c S / k and LONG (c - 1) S, of a half range S, at which sines give a Gaussian
# process with its covariance within 1.5% of the variance, beside an intercept.
SHORT, LONG = 1.75, 0.66


def enough_sines(k: int, c: float) -> int:
    """Return k of gp(x), or how many sines with this c give a wide enough range of length scales."""
    if LONG * (c - 1.0) >= 1.25 * SHORT * c / k:
        return k
    return math.ceil(1.25 * SHORT * c / (LONG * (c - 1.0)))
