"""A formula's terms as `formulae` reads them, checked and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formulae import model_description
from formulae.categorical import ENCODINGS
from formulae.environment import Environment
from formulae.terms.call import Call
from formulae.terms.call_resolver import LazyCall, LazyOperator, LazyVariable
from formulae.transforms import TRANSFORMS

from hierfl.formulas.transforms import (
    CODINGS,
    FUNCTIONS,
    NEAREST,
    OTHERS,
    STATEFUL,
    Constants,
    applied,
)

# Where functions are looked up: formulae's own, then numbers' functions; nothing else is in reach
# of a formula.
ENVIRONMENT = Environment([{**TRANSFORMS, **ENCODINGS}]).with_outer_namespace(FUNCTIONS)


def _is_equal(one: LazyCall, other: object) -> bool:
    return isinstance(other, LazyCall) and (one.callee, one.args, one.kwargs) == (
        other.callee,
        other.args,
        other.kwargs,
    )


# formulae 0.9 compares a call with whatever stands beside it and fails where that is no call, so
# that it cannot read
# scale(age) + scale(log(dose)). With this it can; nothing else changes.
LazyCall.__eq__ = _is_equal


def described(text: str) -> Any:
    """Return the terms of a text, without response and groups, as a `formulae` model.

    Raises:
        ValueError: the text cannot be read, or calls an unsupported function; the message names it
            and the nearest supported one.
    """
    try:
        found = model_description(text)
    except Exception as error:  # formulae raises many kinds, some of them bare Exceptions
        raise ValueError(
            f"the terms '{text}' cannot be read ({error}): {_advice(str(error))}"
        ) from error
    for call in calls(found):
        _check_call(call)
    return found


def _advice(message: str) -> str:
    if "Interaction with" in message:
        return "let a spline stand alone, or use a product with poly(x, 2)"
    return "write a sum of columns, products a * b, and functions of columns"


def calls(found: Any) -> Iterator[LazyCall]:
    """Yield every call in the terms of a `formulae` model, inner ones first."""
    for term in found.common_terms:
        for component in getattr(term, "components", ()):
            if isinstance(component, Call):
                yield from _within(component.call)


def _within(part: Any) -> Iterator[LazyCall]:
    if isinstance(part, LazyOperator):
        for argument in part.args:
            yield from _within(argument)
    if isinstance(part, LazyCall):
        for argument in (*part.args, *part.kwargs.values()):
            yield from _within(argument)
        yield part


def _check_call(call: LazyCall) -> None:
    name = str(call.callee)
    known = {*STATEFUL, *CODINGS, *OTHERS, *FUNCTIONS} - {"np"}
    if name in known or name.removeprefix("np.") in FUNCTIONS:
        return
    if name in NEAREST:
        raise ValueError(f"'{call}' is not supported: write {NEAREST[name]}")
    raise ValueError(
        f"the function '{name}' of '{call}' is not known: make a column of it first, or use one of "
        f"{', '.join(sorted(known - {'offset', 'I'}))}"
    )


def columns_of(found: Any) -> tuple[str, ...]:
    """Return the columns that the terms of a `formulae` model read."""
    names = {name for term in found.common_terms for name in term.var_names}
    return tuple(sorted(names - {""}))


def coded_columns(found: Any) -> frozenset[str]:
    """Return the columns inside C(), S() or T(), categories even where they hold numbers."""
    return frozenset(
        str(call.args[0].name)
        for call in calls(found)
        if call.callee in CODINGS and call.args and isinstance(call.args[0], LazyVariable)
    )


def stateful_calls(found: Any) -> dict[str, LazyCall]:
    """Return the calls whose constants clients agree on, by their text, inner ones first."""
    return {str(call): call for call in calls(found) if call.callee in STATEFUL}


def options_of(call: LazyCall) -> dict[str, Any]:
    """Return the options of a call of `bs` or `poly` by name; refuse those that are no numbers."""
    names = ("degree",) if call.callee == "poly" else ("df",)
    given = dict(zip(names, call.args[1:], strict=False)) | dict(call.kwargs)
    try:
        return {name: value.eval({}, ENVIRONMENT) for name, value in given.items()}
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"the options of '{call}' must be numbers: write them out") from error


def with_constants(found: Any, constants: Mapping[str, Constants]) -> Any:
    """Set the agreed constants of the transforms of a `formulae` model, which is changed.

    `formulae` keeps what a transform has learned in `LazyCall.stateful_transform`; it is set here
    beforehand.
    """
    for call in calls(found):  # products hold copies of their parts
        if str(call) in constants:
            call.stateful_transform = applied(str(call.callee), constants[str(call)])
    return found
