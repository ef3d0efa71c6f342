"""What a method, or a wrapper of one, says of itself, for the tables of the docs and recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from hierfl.method import Method
from hierfl.program.sites import recorded

P = ParamSpec("P")
HEADINGS = {
    "common": "global",
    "own": "local",
    "guide": "guide",
    "kept": "client state",
    "discloses": "discloses",
    "new": "new clients",
    "source": "source",
}  # field of `About` -> heading of a column of `hierfl methods`


@dataclass(frozen=True, kw_only=True)
class About:
    """A decorator of a method's builder, which also makes it recorded.

    What it `infers`; its paper, `source`; what is `common` to clients, and a client's `own`; the
    posterior's form, `guide`, or "points"; what is `kept` between rounds; `discloses` as in
    `Method`; how `new` clients are served; what clients get, `down`, and send, `up`, by entry:
    `name`, or `name`* if weighted by rows.
    """

    infers: str
    source: str = ""
    common: str
    own: str = "none"
    guide: str = "points"
    kept: str = "nothing"
    discloses: Literal["sums", "summaries"] = "sums"
    new: str = "the same steps"
    down: str = "the weights"
    up: str

    def __call__(self, builder: Callable[P, Method]) -> Callable[P, Method]:
        """Return the builder, recorded, with this description."""
        return _described(builder, self)


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A decorator of a wrapper's builder: its `call` without the name, and what it `adds`."""

    call: str = "(method)"
    adds: str

    def __call__(self, builder: Callable[P, Method]) -> Callable[P, Method]:
        """Return the builder, recorded, with this description."""
        return _described(builder, self)


def _described(builder: Callable[P, Method], about: About | Wrapper) -> Callable[P, Method]:
    made = recorded(builder)
    made.__dict__["__about__"] = about
    return made
