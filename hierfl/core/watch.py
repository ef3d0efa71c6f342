"""The time that a computation takes: a line for whoever waits, and an end where it takes too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from hierfl.core.process import set_to

EVERY = 10.0  # seconds between two lines


class OutOfTime(Exception):
    """A computation has taken as long as it may, or would take longer than another; says which."""


@dataclass(eq=False)
class Watch:
    """What a computation that is `watched` may take, and who is told how far it is."""

    say: Callable[[str], None] | None = None
    limit: float = math.inf  # seconds after which it ends
    # whether something else takes less than so many seconds, counted by work
    has_faster: Callable[[float], bool] | None = None

    def __post_init__(self) -> None:
        """Start."""
        self.began = self.last = time.perf_counter()

    def look(self, what: str) -> None:
        """Say what is done, every ten seconds; raise `OutOfTime` beyond the limit."""
        now = time.perf_counter()
        if self.say is not None and now - self.last >= EVERY:
            self.last = now
            self.say(f"{what}, {now - self.began:.0f} s so far")
        if now - self.began >= self.limit:
            raise OutOfTime(f"the rounds took the time limit, {self.limit:.3g} s")


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watched(watch: Watch | None) -> AbstractContextManager[None]:
    """Let long loops report to a watch; to none if it is None."""
    return set_to(_WATCH, watch)


def working(what: str) -> None:
    """Report one step of a long loop."""
    watch = _WATCH.get()
    if watch is not None:
        watch.look(what)


def about_to(why: str, seconds: Callable[[], float]) -> None:
    """Raise `OutOfTime` where a watch has a faster way than what is about to begin."""
    watch = _WATCH.get()
    if watch is not None and watch.has_faster is not None and watch.has_faster(seconds()):
        raise OutOfTime(why)
