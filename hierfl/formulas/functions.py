"""The functions that terms may call: their options, and the values of expressions on rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.expressions import CODINGS, COMPARISONS, Call, Expression, Literal, Name
from hierfl.formulas.transforms import Constants

NUMPY = ("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh")
# Functions of numbers, besides transforms.
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in NUMPY}
FUNCTIONS["np"] = SimpleNamespace(**FUNCTIONS)
CALLABLE = sorted({*STATEFUL, *CODINGS, "I", "cs", "mi", "offset", *FUNCTIONS} - {"np"})
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
COMPARING = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
COMPARED: dict[str, Callable[[Any, Any], Any]] = dict(zip(COMPARISONS, COMPARING, strict=True))


class Option(NamedTuple):
    """An option of a function: its default, and the number of a kind that it must be; `must_be` says so."""

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


def written_options(call: Call) -> list[tuple[str, Expression]]:
    """Return the options of a call as they are written, with the name of one that stands without."""
    return [*zip(OPTIONS.get(call.callee, {}), call.args[1:], strict=False), *call.options]


def options_of(call: Call) -> dict[str, Any]:
    """Return the options of a call by name, with their defaults, but its `by`."""
    values = {name: expression.value for name, expression in written_options(call) if name != "by"}
    return {name: of.default for name, of in OPTIONS.get(call.callee, {}).items()} | values


def value_of(
    expression: Expression, frame: pd.DataFrame, constants: Mapping[str, Constants]
) -> Any:
    """Return an expression's value on `prepared` rows: (n,) or (n, columns), a category, or a scalar."""
    if isinstance(expression, Name):
        series = frame[expression.head]
        return series if hasattr(series, "cat") else series.to_numpy()
    if isinstance(expression, Literal):
        return expression.value
    values = [value_of(arg, frame, constants) for arg in expression.args]
    if expression.callee in STATEFUL:
        by, text = expression.option("by"), str(expression)
        levels = None if by is None else value_of(by, frame, constants)
        return constants[text](expression.callee, text, values[0], by=levels)
    if isinstance(expression, Call):
        function = FUNCTIONS.get(expression.callee.removeprefix("np."))
        return values[0] if function is None else function(values[0])
    if expression.sign in COMPARED:
        return np.asarray(COMPARED[expression.sign](*values), dtype=np.float64)
    return -values[0] if len(values) == 1 else ARITHMETIC[expression.sign](*values)
