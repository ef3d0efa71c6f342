"""A user's own models and guides, marked by the program so that `hierfl.load` finds them.

    @hierfl.model
    def radon(batch): ...

No code is stored in a file. A record holds the name of a marked function, and `load` looks it up
here and nowhere else: never in a module that happens to be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from hierfl.core.misspelled import spelled

Kind = Literal["model", "guide"]
F = TypeVar("F", bound=Callable[..., Any])

_MARKED: dict[tuple[Kind, str], Any] = {}  # (kind, name) -> what bears that name now


@overload
def model(function: F, /, *, name: str | None = None) -> F: ...
@overload
def model(*, name: str | None = None) -> Callable[[F], F]: ...
@spelled
def model(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a model so that `hierfl.load` finds it: `@hierfl.model` or `(name="radon")`.

    The program that loads a fit marks the same model. `load` compares it with the one that was
    fitted, and refuses another one of the same name.

    Args:
        function: the model, a function of a `ClientBatch`.
        name: what it is recorded as. Default None: the function's own name.

    Returns:
        The function itself.

    Raises:
        TypeError: `function` cannot be called, or has no name of its own and none is given.
        ValueError: another model has this name.

    >>> @model
    ... def means(batch): ...
    >>> name_of(means, "model")
    'means'
    """
    return _marker("model", function, name)


@overload
def guide(function: F, /, *, name: str | None = None) -> F: ...
@overload
def guide(*, name: str | None = None) -> Callable[[F], F]: ...
@spelled
def guide(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a guide or a guide family so that `hierfl.load` finds it, as `hierfl.model` does.

    Args:
        function: a guide function, or a family.
        name: what it is recorded as. Default None: the function's own name.

    Returns:
        The guide itself.

    Raises:
        TypeError, ValueError: as `hierfl.model`.
    """
    return _marker("guide", function, name)


def _marker(kind: Kind, function: F | None, name: str | None) -> F | Callable[[F], F]:
    """Mark a function, or return the decorator that does."""
    if function is None:
        return lambda given: _mark(kind, given, name)
    return _mark(kind, function, name)


def _mark(kind: Kind, function: F, name: str | None) -> F:
    if not callable(function):
        raise TypeError(f"{function!r} is no {kind}: mark a function, or give the name as name=...")
    name = name or getattr(function, "__name__", None)
    if not name or "<" in name:
        raise TypeError(
            f"this {kind} has no name of its own: give one, hierfl.{kind}(..., name=...)"
        )
    before = _MARKED.get((kind, name))
    if before is not None and not _is_redefinition(before, function):
        raise ValueError(
            f"{place_of(before)} is marked as the {kind} '{name}' already: give "
            f"{place_of(function)} a name of its own, hierfl.{kind}(name=...)"
        )
    _MARKED[kind, name] = function
    return function


def _is_redefinition(before: object, now: object) -> bool:
    """Return whether one function is the other, defined again in a notebook or an import."""
    if before is now or place_of(before) == place_of(now):
        return True
    files = [getattr(getattr(f, "__code__", None), "co_filename", None) for f in (before, now)]
    names = [getattr(f, "__qualname__", None) for f in (before, now)]
    return files[0] is not None and files[0] == files[1] and names[0] == names[1]


def place_of(function: object) -> str:
    """Return where a function, or the type of an object, is defined: "module:qualname"."""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def name_of(function: object, kind: Kind) -> str | None:
    """Return the name under which a function is marked; None where it is not."""
    return next((name for (k, name), f in _MARKED.items() if k == kind and f is function), None)


def marked(kind: Kind, name: str) -> Any:
    """Return what is marked as a model or guide."""
    found = _MARKED.get((kind, name))
    if found is not None:
        return found
    return next((f for (k, _), f in _MARKED.items() if k == kind and place_of(f) == name), None)
