"""The columns of a design, evaluated on a client's rows as the schema says."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from formulae.contrasts import pick_contrasts
from formulae.matrices import CommonEffectsMatrix
from formulae.terms.terms import create_extra_term
from numpy.typing import NDArray

from hierfl.formulas.columns import Column
from hierfl.formulas.design_terms import Term
from hierfl.formulas.parse import Declaration
from hierfl.formulas.schema import Schema
from hierfl.formulas.terms import ENVIRONMENT, columns_of, with_codings, with_constants
from hierfl.formulas.transforms import BeyondKnots

Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Design:
    """The terms of a text; `places` and `offsets` say where columns and offsets are in `matrix`."""

    has_intercept: bool
    matrix: Any = None
    terms: tuple[Term, ...] = ()
    columns: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    is_smooth: bool = False  # some terms are curves

    @property
    def coded(self) -> frozenset[str]:
        """The names of the columns of categories."""
        return frozenset(name for term in self.terms if term.coords for name in term.columns)

    def evaluate(self, frame: pd.DataFrame, client: str) -> tuple[Matrix, Matrix]:
        """Return the columns of `prepared` rows, (n, P), and the sum of the offsets, (n,), all finite."""
        if self.matrix is None:
            return np.zeros((len(frame), 0)), np.zeros(len(frame))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not finite is refused by name below
            warnings.simplefilter("always", BeyondKnots)
            found = self.matrix.evaluate_new_data(frame)
        for name, place in found.slices.items():
            bad = ~np.isfinite(found.design_matrix[:, place]).all(axis=1)
            if bad.any():
                raise ValueError(
                    f"the term '{name}' is not finite in row {int(bad.argmax())} of client "
                    f"'{client}': correct the row, or take another function"
                )
        values = found.design_matrix.astype(np.float64)
        return values[:, list(self.places)], values[:, list(self.offsets)].sum(1)


def designs_of(declared: Declaration, schema: Schema) -> list[Design]:
    """Return the design of the common terms, and that of each group, with the agreed constants."""
    own = declared.described[: 1 + len(declared.parts.groups)]
    return [_design(with_constants(found, schema.transforms), schema.columns) for found in own]


def every_design_of(declared: Declaration, schema: Schema) -> list[Design]:
    """Return the designs of the response's terms, and then those of parameters'."""
    found = designs_of(declared, schema)
    for own in declared.of_parameters.values() if ";" in declared.text else ():
        found += designs_of(own, schema)
    return found


def _design(found: Any, columns: Mapping[str, Column]) -> Design:
    """Return the design of a `formulae` model, evaluated on a frame made of the schema alone."""
    frame = _typical({name: columns[name] for name in columns_of(found) if name in columns})
    has_intercept = any(type(term).__name__ == "Intercept" for term in found.common_terms)
    if not any(hasattr(term, "components") for term in found.common_terms):
        return Design(has_intercept)
    found = with_codings(found, columns)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            matrix = _evaluated(found, frame)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"the terms {', '.join(t.name for t in found.common_terms)} cannot be evaluated "
                f"({error}): check the kinds of their columns"
            ) from error
    terms: list[Term] = []
    columns_in_order: list[str] = []
    is_smooth = False
    places: dict[bool, list[int]] = {False: [], True: []}  # of columns, and of offsets
    for name, term in matrix.terms.items():
        if name == "Intercept":
            continue
        at = range(matrix.slices[name].start, matrix.slices[name].stop)
        places[term.kind == "offset"] += at
        if term.kind != "offset":
            made: tuple[Term, ...] = ()
            if name.startswith(("s(", "gp(")):
                from hierfl.formulas.smooths import named_smooth

                made = named_smooth(name, term, len(at), columns)
                is_smooth |= bool(made)
            if not made:
                own, order = _named(name, term, len(at))
                made, places[False][-len(at) :] = (own,), [at[i] for i in order]
            for each in made:
                terms.append(each)
                columns_in_order += each.columns
    if is_smooth:
        from hierfl.formulas.smooths import check_constants

        check_constants(terms)
    return Design(
        has_intercept,
        matrix,
        tuple(terms),
        tuple(columns_in_order),
        tuple(places[False]),
        tuple(places[True]),
        is_smooth,
    )


def _evaluated(found: Any, frame: pd.DataFrame) -> CommonEffectsMatrix:
    """Return the columns of a model's terms, coded as in R: formulae 0.9 loses columns of a:b:c."""
    found.set_types(frame, ENVIRONMENT)
    groups: dict[frozenset[str], dict[str, list[str]]] = {}  # numeric parts -> term -> categories
    for term in sorted(found.common_terms, key=lambda t: len(getattr(t, "components", ()))):
        names: dict[str, list[str]] = {"numeric": [], "categoric": []}
        for part in getattr(term, "components", ()):
            # the steps of mo() are coded as a number is: a curve of each level, from a common start
            kind = "numeric" if _callee(part) == "mo" else part.kind
            names.setdefault(kind, []).append(part.name)
        if term.kind != "offset":
            groups.setdefault(frozenset(names["numeric"]), {})[term.name] = names["categoric"]
    codings, terms = {}, []
    for group in groups.values():
        codings.update(pick_contrasts(group))
    for term in found.common_terms:
        *others, own = codings.get(term.name) or [{}]
        for coding in others:  # of fewer categories, which no other term spans
            terms.append(create_extra_term(term, coding, frame, ENVIRONMENT))
            terms[-1].set_data(coding)
        terms.append(term)
        term.set_data(own)
    matrix = CommonEffectsMatrix(terms)
    matrix.evaluate(frame, ENVIRONMENT)
    return matrix


def _typical(columns: Mapping[str, Column]) -> pd.DataFrame:
    """Return rows with every level of each category, and the means of numbers."""
    size, values = 2, dict[str, Any]()
    for column in columns.values():
        size = max(size, len(column.levels))
    for name, column in columns.items():
        values[name] = np.full(size, column.mean)
        if column.kind == "category":
            if len(column.levels) < 2:
                raise ValueError(
                    f"column '{name}' has the single level '{''.join(column.levels)}', so that it "
                    "has no effect: take it out of the formula"
                )
            codes, levels = np.arange(size) % len(column.levels), list(column.levels)
            values[name] = pd.Categorical.from_codes(codes, categories=levels, ordered=True)
    return pd.DataFrame(values, index=range(size))


def _named(name: str, term: Any, width: int) -> tuple[Term, Sequence[int]]:
    """Return a term with the names of its columns, and the order of its columns in the matrix."""
    labels = tuple(term.labels)
    is_coded = any(component.kind == "categoric" for component in term.components)
    parts = frozenset((type(component), component.name) for component in term.components)
    callees = [_callee(component) for component in term.components]
    if width == 1 and not is_coded:
        return Term(name, (name,), (), parts, by_step="cs" in callees), range(1)
    if "mo" in callees:
        return _monotone(name, term, parts, callees.index("mo"))
    return Term(name, labels, _coords(name, labels), parts, by_step="cs" in callees), range(width)


def _monotone(
    name: str, term: Any, parts: frozenset[tuple[type, str]], place: int
) -> tuple[Term, Sequence[int]]:
    """Return mo(x), or a product with it, whose steps of a curve follow each other."""
    factors = [component.labels for component in term.components]
    own = factors.pop(place)
    sizes = [len(component.labels) for component in term.components]
    order = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), place, -1).ravel().tolist()
    columns = tuple(term.labels[i] for i in order)
    curves = tuple(":".join(curve) for curve in product(*factors)) if factors else ()
    steps = _coords(term.components[place].name, own)
    return Term(name, columns, _coords(name, columns), parts, steps, curves), order


def _coords(name: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return what stands in the brackets of the columns of a term, or their names."""
    return tuple(
        label[len(name) + 1 : -1] if label.startswith(f"{name}[") else label for label in labels
    )


def _callee(component: Any) -> str:
    """Return the function of a part of a term, "" of a column."""
    return str(getattr(getattr(component, "call", component), "callee", ""))
