"""A formula's terms as `formulae` reads them, checked and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from formulae.categorical import (
    ENCODINGS,
    CategoricalBox,
    ContrastMatrix,
    Encoding,
    Sum,
    Treatment,
)
from formulae.environment import Environment
from formulae.terms.call import Call
from formulae.terms.call_resolver import LazyCall, LazyOperator, LazyVariable
from formulae.terms.variable import Variable
from formulae.transforms import TRANSFORMS

from hierfl.formulas.columns import Column, level_name
from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.syntax import read_terms
from hierfl.formulas.transforms import (
    CODINGS,
    FUNCTIONS,
    NEAREST,
    OPTIONS,
    OTHERS,
    SMOOTHS,
    Constants,
)

ALONE = ("cs", *SMOOTHS)  # which no product may hold

# Functions in reach of a formula: formulae's own, then numbers' functions.
ENVIRONMENT = Environment(
    [
        {**TRANSFORMS, **ENCODINGS, "mo": TRANSFORMS["C"], "cs": lambda x: x, "mi": lambda x: x},
        dict.fromkeys(("s", "gp"), TRANSFORMS["bs"]),  # replaced by what clients agree on
    ]
).with_outer_namespace(FUNCTIONS)


def _is_equal(one: LazyCall, other: object) -> bool:
    return isinstance(other, LazyCall) and (one.callee, one.args, one.kwargs) == (
        other.callee,
        other.args,
        other.kwargs,
    )


# formulae 0.9 cannot compare a call with another kind: scale(age) + scale(log(dose)). Now it can.
LazyCall.__eq__ = _is_equal
# What binds closer has the higher number.
_BINDING = {"+": 2, "-": 2, "*": 3, "/": 3, "**": 4}


def _operation(self: LazyOperator) -> str:
    """Return an operation as text, with the parentheses that its value needs."""
    own = _BINDING.get(self.symbol, 1)
    texts = []
    for place, part in enumerate(self.args):
        inner = isinstance(part, LazyOperator)
        signed = inner and len(part.args) == 1
        other = _BINDING.get(part.symbol, 1) if inner and not signed else 3
        apart = (
            other < own if signed else other < own or (other == own and (place or own in (1, 4)))
        )
        texts.append(f"({part})" if inner and (apart or len(self.args) == 1) else str(part))
    return f"{self.symbol}{texts[0]}" if len(texts) == 1 else f" {self.symbol} ".join(texts)


# formulae 0.9 leaves parentheses out, so that two terms could have one name, and one was lost.
LazyOperator.__str__ = _operation
# Likewise a column of an odd name, I(`x + z`), without back-quotes.
LazyVariable.__str__ = lambda self: (
    self.name if re.fullmatch(r"[^\W\d][\w.]*", self.name) else f"`{self.name}`"
)


def described(text: str) -> Any:
    """Return terms as a `formulae` model; of an unsupported function name the nearest supported one."""
    found = read_terms(text)
    if "Intercept" in columns_of(found):
        raise ValueError("'Intercept' has the name of the intercept: rename the column")
    for call in calls(found):
        _check_call(call)
        if call.callee in (*ALONE, "mo"):
            _check_alone(found, call)
    return found


def _check_alone(found: Any, call: LazyCall) -> None:
    """Refuse cs() or a smooth inside of a product or of another function, and products of two mo()."""
    for term in found.common_terms:
        parts: Any = getattr(term, "components", ())
        of_parts = [getattr(part, "call", None) for part in parts]
        if any(of is call for of in of_parts):
            monotone = [of for of in of_parts if getattr(of, "callee", "") == "mo"]
            if len(monotone) > 1:
                raise ValueError(
                    f"'{term.name}' is a product of two monotonic effects: take C(x) or x as a number "
                    "for one of them"
                )
            if len(parts) == 1 or call.callee == "mo":
                return
    curve = call.callee in SMOOTHS
    advice = f"; {call.callee}(x, by=z) varies with z" if curve else ""
    raise ValueError(
        f"'{call}' stands in a product or a function: let it be a term of its own{advice}"
    )


def monotone_columns(found: Any) -> set[str]:
    """Return the columns of the monotonic effects of a `formulae` model."""
    return {call.args[0].name for call in calls(found) if call.callee == "mo"}


def calls(found: Any) -> Iterator[LazyCall]:
    """Yield every call in the terms of a `formulae` model, inner ones first."""
    for term in found.common_terms:
        for component in getattr(term, "components", ()):
            if isinstance(component, Call):
                yield from calls_within(component.call)


def calls_within(part: Any) -> Iterator[LazyCall]:
    """Yield every call in a part of a term, inner ones first."""
    if isinstance(part, LazyOperator):
        for argument in part.args:
            yield from calls_within(argument)
    if isinstance(part, LazyCall):
        for argument in (*part.args, *part.kwargs.values()):
            yield from calls_within(argument)
        yield part


def _check_call(call: LazyCall) -> None:
    """Refuse functions that are not known, and arguments that they would not use."""
    name = str(call.callee)
    known = {*STATEFUL, *CODINGS, *OTHERS, *FUNCTIONS} - {"np"}
    if name not in known and name.removeprefix("np.") not in FUNCTIONS:
        if name in NEAREST:
            raise ValueError(f"'{call}' is not supported: write {NEAREST[name]}")
        raise ValueError(
            f"the function '{name}' of '{call}' is not known: make a column of it first, write a "
            f"column's name in backticks, or use one of {', '.join(sorted(known - {'offset', 'I'}))}"
        )
    if not call.args:
        raise ValueError(f"'{call}' has no argument: write {name}(column)")
    if name in ("cs", "mi") and not isinstance(call.args[0], LazyVariable):
        raise ValueError(
            f"'{call}' has no single column: write {name}() of each, {name}(a) + {name}(b), or make a "
            "column"
        )
    if name in CODINGS and not isinstance(call.args[0], LazyVariable):
        raise ValueError(f"'{call}' codes no column: make a column of '{call.args[0]}' first")
    if name in SMOOTHS:
        _check_smooth(call)
    options = OPTIONS.get(name, ())
    for option in call.kwargs:
        if option not in options:
            advice = f"give {', '.join(options)}" if options else "it takes a column alone"
            raise ValueError(f"'{call}' has the option '{option}', which is not known: {advice}")
    if len(call.args) > 1 + len(options[:1]) or (len(call.args) > 1 and options[0] in call.kwargs):
        shown = ", ".join(["column", *(f"{option}=..." for option in options)])
        raise ValueError(f"'{call}' has an argument too many: write {name}({shown})")


def _check_smooth(call: LazyCall) -> None:
    """Refuse a smooth of several columns, one of groups, and a `by` that is no column."""
    if "'re'" in str(call).replace('"', "'"):
        raise ValueError(
            f"'{call}' are groups: write ({call.args[0]} | hospital), or (1 | hospital)"
        )
    if len(call.args) > 1:
        raise ValueError(
            f"'{call}' is a smooth of several columns, which is not supported: write a smooth of "
            f"each, options by name, {call.callee}(x, k=10), or s(x, hospital, bs='fs') for a curve "
            "of each hospital"
        )
    if not isinstance(call.kwargs.get("by", LazyVariable("x")), LazyVariable):
        raise ValueError(f"by of '{call}' is no column: make a column of it first")


def columns_of(found: Any) -> tuple[str, ...]:
    """Return the columns that the terms of a `formulae` model read."""
    names = set[str]().union(*(term.var_names for term in found.common_terms))
    return tuple(sorted(names - {""}))


def bare_columns(found: Any) -> frozenset[str]:
    """Return the columns that are read outside of C(), S() and T(), as the frame has them."""
    terms = [part for term in found.common_terms for part in getattr(term, "components", ())]
    return frozenset(name for part in terms for name in _bare(getattr(part, "call", part)))


def _bare(part: Any) -> Iterator[str]:
    if isinstance(part, Variable | LazyVariable):
        yield str(part.name)
    elif isinstance(part, LazyOperator | LazyCall) and getattr(part, "callee", "") not in CODINGS:
        for argument in part.args:
            yield from _bare(argument)
        if getattr(part, "callee", "") in SMOOTHS and "by" in part.kwargs:
            yield from _bare(part.kwargs["by"])


def options_of(call: LazyCall) -> dict[str, Any]:
    """Return the options of a call by name; refuse those that are no numbers and no texts."""
    given = dict(zip(OPTIONS.get(str(call.callee), ()), call.args[1:], strict=False)) | dict(
        call.kwargs
    )
    given.pop("by", None)  # a column
    try:
        return {name: value.eval({}, ENVIRONMENT) for name, value in given.items()}
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"the options of '{call}' must be numbers: write them out") from error


def with_constants(found: Any, constants: Mapping[str, Constants]) -> Any:
    """Set the agreed constants of a `formulae` model's transforms, in `LazyCall.stateful_transform`."""
    for call in calls(found):  # products hold copies of their parts
        if str(call) in constants:
            found_of = constants[str(call)]
            call.stateful_transform = partial(found_of, str(call.callee), str(call))
    return found


class Steps(Encoding):  # type: ignore[misc]
    """A column for each level but the first, which is 1 from that level on."""

    def code_with_intercept(self, levels: list[str]) -> ContrastMatrix:
        """Return the columns; the first level is zero also where there is no intercept."""
        return self.code_without_intercept(levels)

    def code_without_intercept(self, levels: list[str]) -> ContrastMatrix:
        """Return the columns, (levels, levels - 1)."""
        return ContrastMatrix(np.tri(len(levels), k=-1)[:, : len(levels) - 1], list(levels[1:]))


class _Coded(CategoricalBox):  # type: ignore[misc]
    """A coded column with all agreed levels, some of which the rows at hand may lack."""

    @property
    def levels(self) -> Any:
        """All levels; `formulae` refuses those that the rows lack."""
        return self._levels

    @levels.setter
    def levels(self, value: Any) -> None:
        self._levels = value


def with_codings(found: Any, columns: Mapping[str, Column]) -> Any:
    """Give C(), S() and T() of a `formulae` model the agreed levels of their columns."""
    for call in calls(found):
        if call.callee in CODINGS:
            levels = list(columns[call.args[0].name].levels)
            if not levels:
                raise ValueError(
                    f"'{call}' codes a column that the formula reads as a number elsewhere: make "
                    "a second column of its numbers, or of its names"
                )
            chosen = next((level_name(v) for v in options_of(call).values() if v is not None), None)
            if chosen is not None and chosen not in levels:
                raise ValueError(
                    f"'{call}' names the level '{chosen}', which is none of {', '.join(levels)}"
                )
            coding = Sum(chosen) if call.callee == "S" else Treatment(chosen)
            if call.callee == "mo":
                coding = Steps()
            call.stateful_transform = _coded(coding, levels)
    return found


def _coded(coding: Any, levels: list[str]) -> Callable[..., _Coded]:
    return lambda data, *args, **options: _Coded(data, coding, levels)
