"""What a method says of itself, for the tables of the docs and the names of recipes.

    @About(infers="one global model", common="weights", own="none", ...)
    def fedavg(model, ...): ...

A wrapper of a method has `@Wrapper(...)` in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from hierfl.method import Method
from hierfl.program.recipes import recorded

P = ParamSpec("P")
HEADINGS = {
    "common": "global",
    "own": "local",
    "guide": "guide",
    "kept": "client state",
    "crosses": "what crosses",
    "discloses": "discloses",
    "new": "new clients",
    "source": "source",
}  # field of `About` -> heading of a column of `hierfl methods`


@dataclass(frozen=True, kw_only=True)
class About:
    """A decorator of a method's builder, which also makes it recorded.

    Args:
        infers: what the method infers.
        source: the paper; "": none.
        common: what is common to all clients, and its kind.
        own: what a client has for itself.
        guide: the form of the posterior; "points" where there is none.
        kept: what a client keeps from round to round.
        crosses: what a client sends, in a few words.
        discloses: as `Method.discloses`.
        new: how a client that joins later is served.
        down: what every client of a cohort receives.
        up: what a client sends, by entry: `name`, or `name`* if its weight is the number of rows.
    """

    infers: str
    source: str = ""
    common: str
    own: str
    guide: str = "points"
    kept: str
    crosses: str
    discloses: Literal["sums", "summaries"] = "sums"
    new: str
    down: str = "the weights"
    up: str

    def __call__(self, builder: Callable[P, Method]) -> Callable[P, Method]:
        """Return the builder, recorded, with this description."""
        return _described(builder, self)


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A decorator of a wrapper's builder, which also makes it recorded.

    Args:
        call: how it is called, without its name: "(method, beta=2.0)".
        adds: what it adds to the method in it.
    """

    call: str = "(method)"
    adds: str

    def __call__(self, builder: Callable[P, Method]) -> Callable[P, Method]:
        """Return the builder, recorded, with this description."""
        return _described(builder, self)


def _described(builder: Callable[P, Method], about: About | Wrapper) -> Callable[P, Method]:
    made = recorded(builder)
    made.__dict__["__about__"] = about
    return made
