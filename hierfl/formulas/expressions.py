"""The tree of a formula: expressions of columns and calls, and terms, products of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hierfl.formulas.transforms import Constants

CODINGS = ("C", "S", "T", "mo")  # calls whose column is a category
PLAIN = re.compile(r"[^\W\d][\w.]*")  # a name that needs no backquotes
WORDS = {"True": True, "False": False, "None": None}
BARS, SUMS = ("|", "||"), ("+", "-")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
# Sign -> how closely it binds, as in Python and R: -x ** 2 is -(x ** 2), and a:b * c is (a:b) * c.
BINDING = {"|": 1, "||": 1, **dict.fromkeys(COMPARISONS, 2), "+": 3, "-": 3, "*": 4, "/": 4}
BINDING |= {":": 5, "**": 7}
UNARY = 6
FLOOR = 1e-8  # of a sine's share of the variance: short waves keep a density


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
    def is_minus(self) -> bool:
        """It is a minus before one operand."""
        return self.sign == "-" and len(self.args) == 1

    @property
    def is_constant(self) -> bool:
        """It is a literal, or a number with a minus."""
        if self.is_minus:
            return self.args[0].is_constant and isinstance(self.args[0].value, int | float)
        return isinstance(self, Literal)

    @property
    def value(self) -> Any:
        """The value of a constant; an integer where it is written as one. None of other expressions."""
        if self.is_minus:
            return -self.args[0].value if self.is_constant else None
        if not isinstance(self, Literal) or self.head in WORDS:
            return WORDS.get(self.head)
        if self.head[0] in "\"'":
            return self.head[1:-1]
        return int(self.head) if self.head.isdecimal() else float(self.head)

    @property
    def label(self) -> str:
        """What its coefficient is called."""
        return self.head if isinstance(self, Name) else str(self)

    @property
    def inner(self) -> tuple[Expression, ...]:
        """What it is made of: operands, or arguments and options."""
        return (*self.args, *(value for _, value in self.options))

    def option(self, name: str) -> Expression | None:
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
        """Return the operation as text, with the parentheses that its value needs."""
        if len(self.args) == 1:
            operand = self.args[0]
            return f"{self.sign}({operand})" if operand.sign else f"{self.sign}{operand}"
        own, texts = BINDING[self.sign], list[str]()
        for place, arg in enumerate(self.args):
            # of equal binding the second has parentheses, of comparisons and powers both
            least = own + (place == 1 or own in (2, 7))
            other = UNARY if arg.is_minus else BINDING.get(arg.sign, least)
            texts.append(f"({arg})" if other < least else str(arg))
        return (self.sign if self.sign == ":" else f" {self.sign} ").join(texts)


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
        for inner in expression.inner:
            yield from within(inner, *without)
        yield expression


def calls_within(expression: Expression) -> Iterator[Call]:
    """Yield every call in an expression, inner ones first."""
    yield from (part for part in within(expression) if isinstance(part, Call))


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
    def at(self) -> int:
        """Its place in the text."""
        return self.factors[0].at

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

    def of_curves(self, site: str) -> tuple[str, ...]:
        """Return what the entries of a site of curves are called: the site itself where there is one curve."""
        return tuple(f"{site}[{curve}]" for curve in self.curves) or (site,)
