"""Misspelled arguments: an error that names the function and the nearest argument."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, is_typeddict

T = TypeVar("T", bound=Callable[..., Any])
NOWHERE: Mapping[str, str] = {}
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def spelled(thing: T) -> T:
    """Let a function or class refuse a misspelled argument with the nearest one: a decorator.

    Its signature and its type stay as they are.

    >>> @spelled
    ... def fedavg(model, optimizer=None): ...
    >>> fedavg(None, optimiser=1)
    Traceback (most recent call last):
    TypeError: fedavg() has no argument 'optimiser': did you mean 'optimizer'?
    """
    if isinstance(thing, type):
        init = thing.__init__  # type: ignore[misc]
        setattr(thing, "__init__", _checked(init, thing.__name__, keywords(thing)))  # noqa: B010
        return thing
    return _checked(thing, thing.__name__, keywords(thing))


def spelled_or(elsewhere: Mapping[str, str]) -> Callable[[T], T]:
    """Return `spelled` with what to write in place of arguments that do not exist."""
    return lambda function: _checked(function, function.__name__, keywords(function), elsewhere)


def _checked(
    function: T, name: str, known: tuple[str, ...] | None, elsewhere: Mapping[str, str] = NOWHERE
) -> T:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check_names(name, kwargs, known, elsewhere)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments that may be given by name; None: any name is taken.

    `**options: Unpack[Options]` takes the keys of the TypedDict `Options`.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind in KEYWORDS]
    for rest in (p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD):
        typed = str(rest.annotation).removeprefix("Unpack[").removesuffix("]")
        options = getattr(function, "__globals__", {}).get(typed)
        if not is_typeddict(options):
            return None
        known += options.__annotations__
    return tuple(known)


def check_names(
    name: str,
    given: Iterable[str],
    known: tuple[str, ...] | None,
    elsewhere: Mapping[str, str] = NOWHERE,
) -> None:
    """Refuse an argument outside `known` (None: any); say what to write in its place."""
    for word in given:
        if known is not None and word not in known:
            nearest = difflib.get_close_matches(word, known, n=1)
            fix = f"did you mean '{nearest[0]}'?" if nearest else f"it takes {', '.join(known)}"
            raise TypeError(f"{name}() has no argument '{word}': {elsewhere.get(word, fix)}")
