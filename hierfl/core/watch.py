"""The time that a computation takes: a line for whoever waits, and an end where it takes too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

EVERY = 10.0  # seconds between two lines


class OutOfTime(Exception):
    """A computation has taken as long as it may."""


@dataclass(eq=False)
class Watch:
    """What a computation that is `watched` may take, and who is told how far it is."""

    say: Callable[[str], None] | None = None
    limit: float = math.inf  # seconds after which it ends
    later: Callable[[], float] | None = None  # called once at the limit: another limit
    clock: Callable[[], float] = time.perf_counter  # of the limit

    def __post_init__(self) -> None:
        """Start."""
        self.began = self.last = time.perf_counter()
        self.started = self.clock()

    @property
    def seconds(self) -> float:
        """How long it has taken, by the clock of the limit."""
        return self.clock() - self.started

    def look(self, what: str) -> None:
        """Say what is done, every ten seconds; raise `OutOfTime` beyond the limit."""
        now = time.perf_counter()
        if self.say is not None and now - self.last >= EVERY:
            self.last = now
            self.say(f"{what}, {now - self.began:.0f} s so far")
        if self.seconds >= self.limit and self.later is not None:
            later, self.later = self.later, None
            self.limit = later()
        if self.seconds >= self.limit:
            raise OutOfTime(what)


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Let long loops report to a watch; to none if it is None."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def working(what: str) -> None:
    """Report one step of a long loop."""
    watch = _WATCH.get()
    if watch is not None:
        watch.look(what)
