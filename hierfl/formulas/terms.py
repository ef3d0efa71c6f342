"""The terms of a sum, "1 + age * sex": products of columns and calls, each once, and what may be none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hierfl.formulas.expressions import (
    CODINGS,
    OPTIONS,
    Call,
    Expression,
    Literal,
    Name,
    calls_within,
    names_in,
)

Factor = Name | Call


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
        return frozenset(chain.from_iterable(map(names_in, self.factors)))

    def __str__(self) -> str:
        """Return the term as text."""
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

    def __str__(self) -> str:
        """Return the sum as text."""
        return " + ".join([str(int(self.has_intercept)), *map(str, self.slopes)])


def calls(terms: TermSum) -> Iterator[Call]:
    """Yield every call in some terms, inner ones first."""
    for product in terms.products:
        yield from chain.from_iterable(map(calls_within, product.factors))


def columns_of(terms: TermSum) -> tuple[str, ...]:
    """Return the columns that some terms read."""
    return tuple(sorted({name for product in terms.products for name in product.columns}))


def bare_columns(terms: TermSum) -> frozenset[str]:
    """Return the columns that are read outside of C(), S() and T(), as the frame has them."""
    factors = chain.from_iterable(product.factors for product in terms.products)
    return frozenset(chain.from_iterable(map(_bare, factors)))


def _bare(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Name):
        yield expression.head
    elif expression.callee not in CODINGS:
        yield from chain.from_iterable(map(_bare, expression.inner))


def monotone_columns(terms: TermSum) -> set[str]:
    """Return the columns of the monotonic effects among some terms."""
    return {name for call in calls(terms) if call.callee == "mo" for name in names_in(call)}


def column_of(call: Call) -> str:
    """Return the column of a call that reads one, such as C(sex)."""
    (name,) = names_in(call.args[0])
    return name


def options_of(call: Call) -> dict[str, Any]:
    """Return the options of a call by name, with their defaults, but its `by`."""
    options = OPTIONS.get(call.callee, {})
    written = (*zip(options, call.args[1:], strict=False), *call.options)
    values = {name: constant_of(value) for name, value in written if name != "by"}
    return {name: option.default for name, option in options.items()} | values


def is_constant(expression: Expression) -> bool:
    """Return whether an expression is a literal, with a minus or without."""
    if expression.is_minus:
        number = expression.args[0]
        return isinstance(number, Literal) and isinstance(number.value, int | float)
    return isinstance(expression, Literal)


def constant_of(expression: Expression) -> Any:
    """Return the value of a constant."""
    if expression.is_minus:
        return -constant_of(expression.args[0])
    assert isinstance(expression, Literal)
    return expression.value
