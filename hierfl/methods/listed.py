"""The exported methods and wrappers, and what they say of themselves."""

from __future__ import annotations

from typing import Any, TypeVar

from hierfl import methods
from hierfl.methods.about import About, Wrapper

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
