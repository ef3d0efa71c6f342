"""Expressions of a formula: columns, literals, operations and calls; they compare by what they mean."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.transforms import Constants

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


PLAIN = re.compile(r"[^\W\d][\w.]*")  # a name that needs no backquotes
WORDS = {"True": True, "False": False, "None": None}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
# Sign -> how closely it binds, as in Python and R: -x ** 2 is -(x ** 2), and a:b * c is (a:b) * c.
BINDING = {"|": 1, "||": 1, **dict.fromkeys(COMPARISONS, 2), "+": 3, "-": 3, "*": 4, "/": 4}
BINDING |= {":": 5, "**": 7}
UNARY = 6


@dataclass(frozen=True)
class Expression:
    """A piece of a formula; no comparison asks where it stands, and whether in parentheses.

    Args:
        head: a column's name, a literal as written, an operation's sign or a call's function.
        args: the operands of an operation, one or two, or the arguments of a call.
        options: those of a call, by name.
        at: its place in the text.
        wrapped: whether it is an operation that was written in parentheses.
    """

    head: str
    args: tuple[Expression, ...] = ()
    options: tuple[tuple[str, Expression], ...] = ()
    at: int = field(default=0, compare=False, repr=False, kw_only=True)
    wrapped: bool = field(default=False, compare=False, repr=False, kw_only=True)

    @property
    def sign(self) -> str:
        """The sign of an operation, "" of another expression."""
        return self.head if isinstance(self, Operator) else ""

    @property
    def callee(self) -> str:
        """The function of a call, "" of another expression."""
        return self.head if isinstance(self, Call) else ""

    @property
    def inner(self) -> tuple[Expression, ...]:
        """The arguments and options."""
        return (*self.args, *(value for _, value in self.options))

    @property
    def is_bar(self) -> bool:
        """It is `terms | groups` or `terms || groups`."""
        return self.sign in ("|", "||")

    @property
    def is_sum(self) -> bool:
        """It adds, or takes away."""
        return self.sign in ("+", "-")

    @property
    def is_minus(self) -> bool:
        """It is a minus before one operand."""
        return self.sign == "-" and len(self.args) == 1

    @property
    def label(self) -> str:
        """What its coefficient is called."""
        return self.head if isinstance(self, Name) else str(self)

    def option(self, name: str) -> Expression | None:
        """Return an option that is given by name."""
        return dict(self.options).get(name)

    def __str__(self) -> str:
        """Return the expression as written."""
        return self.head


class Name(Expression):
    """A column."""

    def __str__(self) -> str:
        """Return the name as a formula has it."""
        plain = PLAIN.fullmatch(self.head) and self.head not in WORDS
        return self.head if plain else f"`{self.head}`"


class Literal(Expression):
    """A number, a text in quotes, or True, False or None."""

    @property
    def value(self) -> float | str | bool | None:
        """Its value; an integer where it is written as one."""
        if self.head in WORDS:
            return WORDS[self.head]
        if self.head[0] in "\"'":
            return self.head[1:-1]
        return int(self.head) if self.head.isdecimal() else float(self.head)


class Operator(Expression):
    """A sign and its one or two operands."""

    def __str__(self) -> str:
        """Return the operation as text, with the parentheses that its value needs."""
        if len(self.args) == 1:
            operand = self.args[0]
            return f"{self.sign}({operand})" if operand.sign else f"{self.sign}{operand}"
        own, texts = BINDING[self.sign], list[str]()
        for place, arg in enumerate(self.args):
            other = own + 1
            if arg.sign:
                other = UNARY if len(arg.args) == 1 else BINDING[arg.sign]
            again = place == 1 or own in (2, 7)  # of equal binding: the second, or either
            texts.append(f"({arg})" if other < own or (other == own and again) else str(arg))
        return (self.sign if self.sign == ":" else f" {self.sign} ").join(texts)


class Call(Expression):
    """A function of expressions, and its options by name."""

    def __str__(self) -> str:
        """Return the call as text."""
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.callee}({', '.join([*map(str, self.args), *options])})"


class Dot(Expression):
    """In an update, all that is on this side of the formula."""


def within(expression: Expression) -> Iterator[Expression]:
    """Yield all expressions inside an expression, and then itself."""
    yield from chain.from_iterable(map(within, expression.inner))
    yield expression


def calls_within(expression: Expression) -> Iterator[Call]:
    """Yield every call in an expression, inner ones first."""
    yield from (part for part in within(expression) if isinstance(part, Call))


def names_in(expression: Expression) -> Iterator[str]:
    """Yield the columns that an expression reads."""
    yield from (part.head for part in within(expression) if isinstance(part, Name))


def summands(expression: Expression) -> list[tuple[str, Expression]]:
    """Return the terms of a sum with their signs; what is in parentheses is one term."""
    terms = []
    while expression.is_sum and not expression.wrapped:
        terms.append((expression.sign, expression.args[-1]))
        if len(expression.args) == 1:
            return terms[::-1]
        expression = expression.args[0]
    return [("+", expression), *terms[::-1]]


def value_of(
    expression: Expression, frame: pd.DataFrame, constants: Mapping[str, Constants]
) -> Any:
    """Return an expression's value on `prepared` rows: (n,) or (n, columns), a category, or a scalar."""
    if isinstance(expression, Name):
        series = frame[expression.head]
        return series if hasattr(series, "cat") else series.to_numpy()
    if isinstance(expression, Literal):
        return expression.value
    if isinstance(expression, Call):
        return _value_of_call(expression, frame, constants)
    values = [value_of(arg, frame, constants) for arg in expression.args]
    if expression.sign in COMPARISONS:
        return np.asarray(COMPARISONS[expression.sign](*values), dtype=np.float64)
    return -values[0] if len(values) == 1 else ARITHMETIC[expression.sign](*values)


def _value_of_call(call: Call, frame: pd.DataFrame, constants: Mapping[str, Constants]) -> Any:
    value = value_of(call.args[0], frame, constants)
    if call.callee in STATEFUL:
        by = call.option("by")
        levels = None if by is None else value_of(by, frame, constants)
        return constants[str(call)](call.callee, str(call), value, by=levels)
    function = FUNCTIONS.get(call.callee.removeprefix("np."))
    return value if function is None else function(value)
