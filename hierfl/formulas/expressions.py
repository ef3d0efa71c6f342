"""The tree of a formula: expressions of columns and calls, their values, and terms, products of them."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from hierfl.formulas.schema import STATEFUL
from hierfl.formulas.transforms import Constants, Smooth

CODINGS = ("C", "S", "T", "mo")  # calls whose column is a category
NUMPY = ("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh")
PLAIN = re.compile(r"[^\W\d][\w.]*")  # a name that needs no backquotes
WORDS = {"True": True, "False": False}
BARS, SUMS, PRODUCTS = ("|", "||"), ("+", "-"), (":", "*", "/")
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
COMPARING = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
COMPARISONS = dict(zip(("==", "!=", "<", "<=", ">", ">="), COMPARING, strict=True))
# Sign -> how closely it binds, as in Python and R: -x ** 2 is -(x ** 2), and a:b * c is (a:b) * c.
BINDING = {"|": 1, "||": 1, **dict.fromkeys(COMPARISONS, 2), "+": 3, "-": 3, "*": 4, "/": 4}
BINDING |= {":": 5, "**": 7}
UNARY = 6


@dataclass(frozen=True)
class Expression:
    """A piece of a formula, `at` a place in the text, that no comparison asks for."""

    head: str  # a column's name, a literal as written, an operation's sign or a call's function
    args: "tuple[Expression, ...]" = ()  # one or two operands, or the arguments of a call
    options: "tuple[tuple[str, Expression], ...]" = ()  # those of a call, by name
    at: int = field(default=0, compare=False, repr=False, kw_only=True)
    wrapped: bool = field(default=False, kw_only=True)  # is it an operation in parentheses?

    @property
    def sign(self) -> str:
        """The sign of an operation, "" of another expression."""
        return self.head if isinstance(self, Operator) else ""

    @property
    def callee(self) -> str:
        """The function of a call, "" of another expression."""
        return self.head if isinstance(self, Call) else ""

    @property
    def is_minus(self) -> bool:
        """It is a minus before one operand."""
        return self.sign == "-" and len(self.args) == 1

    @property
    def value(self) -> Any:
        """The value of a literal, or of a number with a minus; None of other expressions."""
        if self.is_minus:
            number = self.args[0].value
            return -number if isinstance(number, int | float) else None
        if not isinstance(self, Literal):
            return None
        if self.head in WORDS or self.head[0] in "\"'":
            return WORDS.get(self.head, self.head[1:-1])
        return int(self.head) if self.head.isdecimal() else float(self.head)

    @property
    def label(self) -> str:
        """What its coefficient is called."""
        return self.head if isinstance(self, Name) else str(self)

    def option(self, name: str) -> "Expression | None":
        """Return an option that is given by name."""
        return dict(self.options).get(name)

    def __str__(self) -> str:
        return self.head


class Name(Expression):
    """A column."""

    def __str__(self) -> str:
        plain = PLAIN.fullmatch(self.head) and self.head not in WORDS
        return self.head if plain else f"`{self.head}`"


class Literal(Expression):
    """A number, a text in quotes, or True, False or None."""


class Operator(Expression):
    """A sign and its one or two operands."""

    def __str__(self) -> str:
        sign = self.sign if self.sign == ":" else f" {self.sign} "
        text = f"-{self.args[0]}" if self.is_minus else sign.join(map(str, self.args))
        return f"({text})" if self.wrapped else text


class Call(Expression):
    """A function of expressions, and its options by name."""

    def __str__(self) -> str:
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.callee}({', '.join([*map(str, self.args), *options])})"


DOT = Literal(".")  # in an update, all that is on this side of the formula
Factor = Name | Call


def within(expression: Expression, *without: str) -> Iterator[Expression]:
    """Yield all expressions inside an expression, and then itself, and nothing of calls of some functions."""
    if expression.callee not in without:
        for inner in (*expression.args, *(value for _, value in expression.options)):
            yield from within(inner, *without)
        yield expression


def calls_within(expression: Expression) -> Iterator[Call]:
    """Yield every call in an expression, inner ones first."""
    yield from (inner for inner in within(expression) if isinstance(inner, Call))


def summands(expression: Expression) -> list[tuple[str, Expression]]:
    """Return the terms of a sum with their signs; what is in parentheses is one term."""
    terms = []
    while expression.sign in SUMS and not expression.wrapped:
        *before, last = expression.args
        terms.append((expression.sign, last))
        if not before:
            return terms[::-1]
        expression = before[0]
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
    first, *others = (value_of(arg, frame, constants) for arg in expression.args)
    if (sign := expression.sign) in COMPARISONS:
        return np.asarray(COMPARISONS[sign](first, *others), dtype=np.float64)
    if sign:
        return ARITHMETIC[sign](first, *others) if others else -first
    if expression.callee in STATEFUL:
        by, text = expression.option("by"), str(expression)
        levels = None if by is None else value_of(by, frame, constants)
        return constants[text](expression.callee, text, first, by=levels)
    name = expression.callee.removeprefix("np.")
    return getattr(np, name)(first) if name in NUMPY else first


# ------------------------------------------------------------ terms
@dataclass(frozen=True)
class Product:
    """A term: its factors, in the order in which they are written; the intercept has none."""

    factors: tuple[Factor, ...] = ()

    @property
    def name(self) -> str:
        """The term's name, "age:sex"."""
        return ":".join(factor.label for factor in self.factors) or "Intercept"

    @property
    def is_offset(self) -> bool:
        """It has no coefficient."""
        return [factor.callee for factor in self.factors] == ["offset"]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it reads."""
        return frozenset(columns_of(TermSum((self,))))

    def __str__(self) -> str:
        return ":".join(map(str, self.factors)) or "1"


@dataclass(frozen=True)
class TermSum:
    """The terms of one sum, in order."""

    products: tuple[Product, ...]

    @property
    def has_intercept(self) -> bool:
        """Whether one of them is the intercept."""
        return Product() in self.products

    @property
    def slopes(self) -> tuple[Product, ...]:
        """The terms but the intercept."""
        return tuple(product for product in self.products if product.factors)

    @property
    def factors(self) -> Iterator[Factor]:
        """The factors of all terms."""
        return chain.from_iterable(product.factors for product in self.products)

    def __str__(self) -> str:
        return " + ".join([str(int(self.has_intercept)), *map(str, self.slopes)])


def calls(terms: TermSum) -> Iterator[Call]:
    """Yield every call in some terms, inner ones first."""
    return chain.from_iterable(map(calls_within, terms.factors))


def columns_of(terms: TermSum, *without: str) -> tuple[str, ...]:
    """Return the columns that some terms read, outside of calls of some functions."""
    inner = chain.from_iterable(within(factor, *without) for factor in terms.factors)
    return tuple(sorted({of.head for of in inner if isinstance(of, Name)}))


def column_of(call: Call) -> str:
    """Return the column of a call that reads one, such as C(sex)."""
    return call.args[0].head


@dataclass(frozen=True)
class DesignTerm:
    """A term and the names of its columns, such as "sex[male]"; `coords` has those in brackets, "male".

    `factors` says what it is made of: a column called "x:z" is not the product of x and z.
    """

    name: str
    columns: tuple[str, ...]
    coords: tuple[str, ...]
    factors: frozenset[Factor]
    steps: tuple[str, ...] = ()  # of mo(x): the levels up to which each of its columns is a step
    curves: tuple[str, ...] = ()  # what mo(x) is multiplied by: each has steps of its own, in a row
    smooth: Smooth | None = None  # of curves, whose coefficients share a scale
    by_step: bool = False  # cs(x): it has a coefficient for each threshold

    @property
    def monotone(self) -> bool:
        """It is mo(x), or a product with it: the coefficients of a curve are of one sign."""
        return bool(self.steps)

    def calls(self, callee: str) -> bool:
        """Return whether a factor of it is a call of this function."""
        return any(factor.callee == callee for factor in self.factors)

    @property
    def scale_sites(self) -> dict[str, str]:
        """The sites of a smooth's scales: "sds" -> "sds_s(x)"; none of another term."""
        return {kind: f"{kind}_{self.name}" for kind in self.smooth.kinds} if self.smooth else {}

    @property
    def sites(self) -> tuple[str, ...]:
        """All its sites."""
        steps = (f"b_{self.name}", f"simplex_{self.name}") if self.monotone else ()
        return (*steps, self.name, *self.scale_sites.values())

    def of_curves(self, site: str) -> tuple[str, ...]:
        """Return what the entries of a site of curves are called: the site itself where there is one curve."""
        return tuple(f"{site}[{curve}]" for curve in self.curves) or (site,)
