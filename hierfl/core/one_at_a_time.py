"""One call at a time in a process: the state of Pyro and torch that a program runs on belongs to all threads.

Pyro's stack of handlers and its validation flag, torch's generator and its number of threads, and Python's
filters of warnings are one each in a process. Two threads that run programs at once would mix them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_turn: list[Any] = [RLock()]


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that a thread that calls it waits until no other thread is in such a function."""

    @wraps(function)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> R:
        with _turn[0]:
            return function(*args, **kwargs)

    return in_turn


def _new_turn() -> None:
    """Give a copy of this process a lock of its own: the thread that held the old one was not copied."""
    _turn[0] = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_turn)
