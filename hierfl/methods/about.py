"""What methods and wrappers of one say of themselves, for the tables of the docs and recipes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from hierfl import methods
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


def _described(about: "About | Wrapper", builder: Callable[P, Method]) -> Callable[P, Method]:
    """Return the builder, recorded, with a description."""
    made = recorded(builder)
    made.__dict__["__about__"] = about
    return made


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

    __call__ = _described


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A decorator of a wrapper's builder: its `call` without the name, and what it `adds`."""

    call: str = "(method)"
    adds: str

    __call__ = _described


Said = TypeVar("Said")


def described(kind: type[Said]) -> dict[str, Said]:
    """Return what methods (`About`) or wrappers (`Wrapper`) say, those with posteriors first."""
    abouts: dict[str, Any] = {n: getattr(methods, n).__about__ for n in methods.__all__}
    of_kind = {name: about for name, about in sorted(abouts.items()) if isinstance(about, kind)}
    points = {n for n, about in of_kind.items() if getattr(about, "guide", "").startswith("points")}
    return {name: of_kind[name] for name in sorted(of_kind, key=lambda n: (n in points, n))}


def names() -> list[str]:
    """Return the names of all exported methods and wrappers."""
    return [*described(About), *described(Wrapper)]
