"""What a fitted formula says: effects, comparisons, profiles of clients, survival curves, R2."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

# A method of a fit of a formula -> the module of the function, whose first argument is the fit.
METHODS = {
    "effects": "conditional_effects",
    "predictions": "predictions",
    "comparisons": "comparisons",
    "hypotheses": "hypotheses",
    "profile": "profile",
    "survival": "survival_curves",
    "r2": "r2",
    "imputed": "imputed",
    "icc": "icc",
}


class _Method:
    """A method whose module is imported at its first use: effects import pandas and SciPy."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, fit: object, kind: type) -> Any:
        function = getattr(import_module(f"{__name__}.{METHODS[self.name]}"), self.name)
        return function if fit is None else function.__get__(fit, kind)


def with_effects(kind: type[T]) -> type[T]:
    """Give a class of fits these methods; the class names them for the type checker alone."""
    for name in METHODS:
        method = _Method()
        method.__set_name__(kind, name)
        setattr(kind, name, method)
    return kind
