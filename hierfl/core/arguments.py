"""Checks of a user's arguments: kinds, misspelled names, and names chosen by a rule."""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, is_typeddict


class NoSuchName(KeyError):
    """A name that stands for nothing here; the message is shown as it is written."""

    __str__ = Exception.__str__  # that of KeyError puts quotes around the message


PLAIN = (str, int, float, bool, type(None))  # kinds of which a message shows the value


def shown(value: Any) -> str:
    """Return a value for a message: as it is written where it is plain, else its kind.

    >>> shown("x"), shown(2.5), shown([1, 2])
    ("'x'", '2.5', 'a list')
    """
    kind = type(value).__name__
    if isinstance(value, PLAIN):
        return repr(value)
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def expect_count(value: Any, what: str, *, least: int = 1) -> int:
    """Return `value`, which must be an integer of `least` or more; `what` names it in the error."""
    number = expect_integer(value, what, f"{least} or more")
    if number < least:
        raise ValueError(f"{what} is {number}: it must be {least} or more")
    return number


def expect_integer(value: Any, what: str, which: str = "") -> int:
    """Return `value`, which must be an integer, such as a seed; else a TypeError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    of = f" of {which}" if which else ""
    raise TypeError(f"{what} is {shown(value)}: it must be an integer{of}")


def expect_kind(value: Any, kind: Any, what: str, instead: str) -> None:
    """Refuse a value of another kind; `instead` says what to give."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {shown(value)}: {instead}")


def expect(**arguments: tuple[Any, str | Collection[Any]]) -> None:
    """Refuse arguments (value, allowed) outside an interval, such as "[0, 1) or None", or a choice.

    >>> expect(prox=(-1.0, "[0, inf)"))
    Traceback (most recent call last):
    ValueError: prox is -1.0: it must be in [0, inf)
    """
    for name, (value, allowed) in arguments.items():
        if not isinstance(allowed, str):
            if value not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {value!r}: it must be one of {words}")
        elif not (value is None and allowed.endswith(" or None")) and not _within(value, allowed):
            raise ValueError(f"{name} is {value}: it must be in {allowed}")


def _within(value: Any, interval: str) -> bool:
    interval = interval.removesuffix(" or None")
    least, greatest = map(float, interval[1:-1].split(","))
    above = value >= least if interval[0] == "[" else value > least
    return bool(above and (value <= greatest if interval[-1] == "]" else value < greatest))


def expect_path(value: Any, what: str, like: str) -> Path:
    """Return `value` as a path; a TypeError where it is neither a string nor a path."""
    if isinstance(value, str | os.PathLike) and not isinstance(value, bytes):
        return Path(value)
    raise TypeError(f"{what} is {shown(value)}, not a path: name one, such as {like!r}")


NameRule = str | Sequence[str] | Callable[[str], bool]


def names_by_rule(
    names: Sequence[str], rule: NameRule, *, option: str, of: str = "the module's parameters"
) -> frozenset[str]:
    """Return the names that a rule chooses; every part of the rule must match a name.

    "all", "none", a regular expression that is searched for, prefixes, or a predicate.

    >>> sorted(names_by_rule(["0.weight", "0.bias", "2.bias"], "bias", option="local"))
    ['0.bias', '2.bias']
    """
    if rule in ("all", "none"):
        return frozenset(names if rule == "all" else ())
    rules: dict[str, Callable[[str], object]]
    if callable(rule):
        rules = {"the predicate": rule}
    elif isinstance(rule, str):
        rules = {f"the pattern '{rule}'": re.compile(rule).search}
    else:
        rules = {f"the prefix '{p}'": re.compile(f"^{re.escape(p)}").search for p in rule}
    chosen: set[str] = set()
    for what, matches in rules.items():
        matching = {name for name in names if matches(name)}
        if not matching:
            raise ValueError(f"{option}: {what} matches none of {of}: {', '.join(names)}")
        chosen |= matching
    return frozenset(chosen)


T = TypeVar("T", bound=Callable[..., Any])
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


def _checked(function: T, name: str, allowed: tuple[str, ...] | None) -> T:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check_names(name, kwargs, allowed)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of arguments, with those of `Unpack[Options]`; None: any name is taken."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in KEYWORDS:
            names.append(parameter.name)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            typed = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            options = getattr(function, "__globals__", {}).get(typed)
            if not is_typeddict(options):
                return None
            names += options.__annotations__
    return tuple(names)


def check_names(name: str, names: Iterable[str], allowed: tuple[str, ...] | None) -> None:
    """Refuse an argument outside `allowed` (None: any); say what to write in its place."""
    for word in names:
        if allowed is not None and word not in allowed:
            fix = did_you_mean(word, allowed) or f"it takes {', '.join(allowed)}"
            raise TypeError(f"{name}() has no argument '{word}': {fix}")


def did_you_mean(word: str, words: Iterable[str], then: str = "", *, cutoff: float = 0.6) -> str:
    """Return a question with the nearest of the words, or nothing if none is near; `then` more words.

    >>> did_you_mean("AGE", ["age", "sex"])
    "did you mean 'age'?"
    """
    folded = {known.casefold(): known for known in words}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return " ".join([*(f"did you mean '{folded[name]}'?" for name in near), then]).strip()


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that does not exist (ValueError), with the nearest one that does.

    >>> check_known("there is no key", "min_row", ["min_rows", "columns"])
    Traceback (most recent call last):
    ValueError: there is no key 'min_row': did you mean 'min_rows'?
    """
    if name not in known:
        raise ValueError(f"{what} '{name}': {did_you_mean(name, known, cutoff=0.0)}")


def imported(text: str, folder: str | Path = "") -> Any:
    """Return what "MODULE:NAME" names, of a module that is installed or in a folder; default: the current one."""
    module, _, name = text.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"'{text}' cannot be imported: {error}") from error
