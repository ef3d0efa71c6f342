"""Methods of a class in modules of their own, which are imported when a method is first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class LateMethod:
    """The function of a module, whose first argument is the object, as a method."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, value: object, kind: type) -> Any:
        """Return the function, bound to the object."""
        function = getattr(import_module(self.module), self.name)
        return function if value is None else function.__get__(value, kind)


def late_methods(modules: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Give a class methods, name -> module of the function; the class names them for the type checker alone."""

    def decorated(kind: type[T]) -> type[T]:
        for name, module in modules.items():
            setattr(kind, name, LateMethod(module, name))
        return kind

    return decorated
