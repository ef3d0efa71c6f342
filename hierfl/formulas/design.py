"""The columns of a design, evaluated on a client's rows as the schema says."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from itertools import product as combined
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.data.consistency import RowsFault
from hierfl.formulas.columns import Column, level_name
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.expressions import (
    CODINGS,
    Call,
    DesignTerm,
    Factor,
    Product,
    TermSum,
    columns_of,
    value_of,
)
from hierfl.formulas.schema import Schema
from hierfl.formulas.signatures import arguments
from hierfl.formulas.smooths import check_constants, named_smooth
from hierfl.formulas.transforms import SMOOTHS, Constants, warn_far

Matrix = NDArray[np.float64]


class Coded(NamedTuple):
    """A factor of a term, its `coords`, what tells its columns apart, and codes of levels, (levels, columns)."""

    factor: Factor
    coords: tuple[str, ...] = ()
    codes: Matrix | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its columns, "sex[male]", or of its only one."""
        label = self.factor.label
        return tuple(f"{label}[{name}]" for name in self.coords) or (label,)


class TermColumns(NamedTuple):
    """The columns of one term: products of those of its factors, (n, p), which may have another `order`."""

    name: str
    factors: tuple[Coded, ...]
    order: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Design:
    """The terms of a sum, and how their columns and the offsets are evaluated."""

    has_intercept: bool
    blocks: tuple[TermColumns, ...] = ()
    offsets: tuple[Product, ...] = ()
    terms: tuple[DesignTerm, ...] = ()
    columns: tuple[str, ...] = ()
    constants: Mapping[str, Constants] = field(default_factory=dict)

    @property
    def is_smooth(self) -> bool:
        """Whether some terms are curves."""
        return any(term.smooth for term in self.terms)

    @property
    def coded(self) -> frozenset[str]:
        """The names of the columns of categories."""
        return frozenset(name for term in self.terms if term.coords for name in term.columns)

    def evaluate(self, frame: pd.DataFrame, client: str) -> tuple[Matrix, Matrix]:
        """Return the columns of `prepared` rows, (n, P), and the sum of the offsets, (n,), all finite."""
        matrices, offset = [np.zeros((len(frame), 0))], np.zeros(len(frame))
        values = _Values(frame, self.constants)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not finite is refused by name below
            for block in self.blocks:
                matrix = _finite(values.columns_of(block.factors), block.name, client)
                matrices.append(matrix if block.order is None else matrix[:, block.order])
            for term in self.offsets:
                own = values.matrix_of(term.factors[0])
                offset = offset + _finite(own, term.name, client)[:, 0]
        return np.concatenate(matrices, axis=1), offset

    def warn_beyond(self, frame: pd.DataFrame, client: str) -> None:
        """Warn of values of a client's `prepared` rows that are far outside of the knots of a spline."""
        for factor in dict.fromkeys(
            coded.factor for block in self.blocks for coded in block.factors
        ):
            constants = self.constants.get(str(factor))
            if constants is not None and constants.knots:
                x = value_of(factor.args[0], frame, self.constants)
                warn_far(str(factor), np.asarray(x, dtype=np.float64), constants.knots, client)


class _Values:
    """The values of factors on some rows, each evaluated once."""

    def __init__(self, frame: pd.DataFrame, constants: Mapping[str, Constants]) -> None:
        self.frame, self.constants = frame, constants
        self.values: dict[Factor, Any] = {}

    def value_of(self, factor: Factor) -> Any:
        """Return a factor's value."""
        if factor not in self.values:
            self.values[factor] = value_of(factor, self.frame, self.constants)
        return self.values[factor]

    def matrix_of(self, factor: Factor) -> Matrix:
        """Return the columns of a factor of numbers, (n, p)."""
        value = self.value_of(factor)
        if hasattr(value, "cat"):
            raise TypeError(f"'{factor}' is a category, not a number")
        value = np.asarray(value, dtype=np.float64)
        return np.broadcast_to(value, len(self.frame))[:, None] if value.ndim < 2 else value

    def columns_of(self, factors: Sequence[Coded]) -> Matrix:
        """Return the products of the columns of some factors, (n, p)."""
        matrices = [
            self.matrix_of(coded.factor)
            if coded.codes is None
            else coded.codes[self.value_of(coded.factor).cat.codes.to_numpy()]
            for coded in factors
        ]
        return reduce(lambda a, b: (a[:, :, None] * b[:, None, :]).reshape(len(a), -1), matrices)


def _finite(matrix: Matrix, name: str, client: str) -> Matrix:
    bad = ~np.isfinite(matrix).all(axis=1)
    if bad.any():
        what = f"the term '{name}' is not finite in"
        row = f"{what} row {int(bad.argmax())} of client '{client}'"
        raise RowsFault(f"{row}: correct the row, or use another function", f"{what} some row")
    return matrix


def designs_of(declared: Declaration, schema: Schema) -> list[Design]:
    """Return the design of the common terms, and that of each group, with the agreed constants."""
    return [_design(terms, schema) for terms in declared.parts.terms]


def every_design_of(declared: Declaration, schema: Schema) -> list[Design]:
    """Return the designs of the response's terms, and then those of parameters'."""
    return [_design(terms, schema) for terms in declared.described]


def _design(terms: TermSum, schema: Schema) -> Design:
    """Return the design of some terms, evaluated on a frame made of the schema alone."""
    columns = schema.columns
    if not terms.slopes:
        return Design(terms.has_intercept)
    typical = _typical({n: columns[n] for n in columns_of(terms) if n in columns})
    values = _Values(typical, schema.transforms)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            coded = [*_coded(terms, values)]
            for offset in filter(lambda product: product.is_offset, terms.slopes):
                values.matrix_of(offset.factors[0])
        except (TypeError, KeyError, AttributeError) as error:
            what = f"the terms {terms} cannot be evaluated ({error})"
            raise ValueError(f"{what}: check the kinds of their columns") from error
    blocks, made = [], list[DesignTerm]()
    for term, factors in coded:
        own, order = _named(term.name, factors, schema)
        blocks.append(TermColumns(term.name, factors, order))
        made += own
    if any(term.smooth for term in made):
        check_constants(made)
    return Design(
        terms.has_intercept,
        tuple(blocks),
        tuple(product for product in terms.slopes if product.is_offset),
        tuple(made),
        tuple(name for term in made for name in term.columns),
        schema.transforms,
    )


def _coded(terms: TermSum, values: _Values) -> Iterator[tuple[Product, tuple[Coded, ...]]]:
    """Yield the terms with the codes of their categories, so that no column is in the span of others.

    As in R: a category is coded in full where no other term has what its first level lacks. A term with
    several codings, which no other terms span, is several: "x + h:j:x" is "x + j:x + h:j:x".
    """
    plain = [product for product in terms.products if not product.is_offset]
    categories = {
        product: tuple(f for f in product.factors if _is_category(f, values)) for product in plain
    }
    used: dict[frozenset[Factor], set[frozenset[tuple[Factor, bool]]]] = {}
    codings = {}
    for product in sorted(plain, key=lambda p: len(p.factors)):
        numeric = frozenset(product.factors) - {*categories[product]}
        codings[product] = _codings(categories[product], used.setdefault(numeric, set()))
    for product in (product for product in terms.slopes if product in codings):
        *others, last = codings[product] or [{}]
        numbers = [factor for factor in product.factors if factor not in categories[product]]
        for coding in others:
            own = Product((*(f for f in categories[product] if f in coding), *numbers))
            yield own, tuple(_code(f, coding.get(f, False), values) for f in own.factors)
        yield product, tuple(_code(f, last.get(f, False), values) for f in product.factors)


def _codings(
    categories: tuple[Factor, ...], used: set[frozenset[tuple[Factor, bool]]]
) -> list[dict[Factor, bool]]:
    """Return codings of a product of categories, whether each is in full, that span what is not `used` yet.

    Subsets of the categories, coded without their first levels, span spaces that add up to that of the
    product. Two that differ by one category are one that has this category in full, as in patsy.
    """
    sizes = range(len(categories) + 1)
    subsets = (subset for size in sizes for subset in combinations(categories, size))
    spaces = [frozenset((category, False) for category in subset) for subset in subsets]
    spaces = [space for space in spaces if space not in used]
    used.update(spaces)
    while pair := next(
        (
            (small, large)
            for small, large in combinations(spaces, 2)
            if len(large) == len(small) + 1 and small < large
        ),
        None,
    ):
        small, large = pair
        ((category, _),) = large - small
        spaces[spaces.index(large)] = small | {(category, True)}
        spaces.remove(small)
    return [dict(space) for space in spaces]


def _is_category(factor: Factor, values: _Values) -> bool:
    """Whether a factor is coded by its levels; mo() is a number here, so that the curves of levels start together."""
    return factor.callee != "mo" and hasattr(values.value_of(factor), "cat")


def _code(factor: Factor, full: bool, values: _Values) -> Coded:
    """Return a factor with the codes of its category, whose first or chosen level has none, or its columns."""
    value, callee = values.value_of(factor), factor.callee
    if not hasattr(value, "cat"):
        if callee in CODINGS:
            fix = "make a second column of its numbers, or of its names"
            raise ValueError(f"'{factor}' codes a column that is read as a number elsewhere: {fix}")
        width = values.matrix_of(factor).shape[1]
        return Coded(factor, tuple(map(str, range(width))) if width > 1 else ())
    levels = list(value.cat.categories)
    options = arguments(factor) if isinstance(factor, Call) else {}
    option = options.get("ref", options.get("omit"))
    chosen = None if option is None else level_name(option)
    if chosen is not None and chosen not in levels:
        what = f"'{factor}' names the level '{chosen}'"
        raise ValueError(f"{what}, which is not one of {', '.join(levels)}")
    base = levels.index(chosen) if chosen is not None else -(callee == "S") % len(levels)
    names, codes = levels[:base] + levels[base + 1 :], np.eye(len(levels))
    if callee == "mo":
        names, codes = levels[1:], np.tri(len(levels), k=-1)[:, :-1]
    elif callee == "S":
        codes = np.delete(codes, base, axis=1)
        codes[base] = -1.0
        if full:
            names, codes = ["mean", *names], np.insert(codes, 0, 1.0, axis=1)
    elif full:
        names = levels
    else:
        codes = np.delete(codes, base, axis=1)
    return Coded(factor, tuple(names), codes)


def _typical(columns: Mapping[str, Column]) -> pd.DataFrame:
    """Return rows with every level of each category, and the means of numbers."""
    size, values = 2, dict[str, Any]()
    for column in columns.values():
        size = max(size, len(column.levels))
    for name, column in columns.items():
        values[name] = np.full(size, column.mean)
        if column.kind == "category":
            if len(column.levels) < 2:
                level = "".join(column.levels)
                raise ValueError(f"column '{name}' has the single level '{level}': take it out")
            codes, levels = np.arange(size) % len(column.levels), list(column.levels)
            values[name] = pd.Categorical.from_codes(codes, categories=levels, ordered=True)
    return pd.DataFrame(values, index=range(size))


# ------------------------------------------------------------ names
def _named(
    name: str, factors: Sequence[Coded], schema: Schema
) -> tuple[tuple[DesignTerm, ...], tuple[int, ...] | None]:
    """Return a term with the names of its columns, two of s(x), and the order of its columns."""
    made_of = frozenset(coded.factor for coded in factors)
    callees = [coded.factor.callee for coded in factors]
    if {*callees} & {*SMOOTHS}:
        (call,) = made_of
        assert isinstance(call, Call)
        return named_smooth(call, schema), None
    labels = tuple(":".join(some) for some in combined(*(coded.labels for coded in factors)))
    by_step = "cs" in callees
    if not any(coded.coords for coded in factors):
        return (DesignTerm(name, (name,), (), made_of, by_step=by_step),), None
    if "mo" in callees:
        term, order = _monotone(name, factors, made_of)
        return (term,), order
    return (DesignTerm(name, labels, _coords(factors, labels), made_of, by_step=by_step),), None


def _coords(factors: Sequence[Coded], columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return what tells the columns of a term apart: the last factor's levels, or their names."""
    *others, last = factors
    return columns if any(coded.coords for coded in others) else last.coords


def _monotone(
    name: str, factors: Sequence[Coded], made_of: frozenset[Factor]
) -> tuple[DesignTerm, tuple[int, ...]]:
    """Return mo(x), or a product with it, whose steps of a curve follow each other."""
    place = next(k for k, coded in enumerate(factors) if coded.factor.callee == "mo")
    labels = [coded.labels for coded in factors]
    sizes = list(map(len, labels))
    order = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), place, -1).ravel().tolist()
    every = [":".join(some) for some in combined(*labels)]
    labels.pop(place)
    columns = tuple(every[i] for i in order)
    curves = tuple(":".join(curve) for curve in combined(*labels)) if labels else ()
    steps = factors[place].coords
    coords = _coords(factors, columns)
    return DesignTerm(name, columns, coords, made_of, steps, curves), tuple(order)
