"""What `hierfl audit` runs: a method by name on the demo's hierarchy, or a user's own."""

from typing import TypeVar

from hierfl import methods
from hierfl.core.arguments import imported
from hierfl.data.clients import ClientData
from hierfl.demo.run import hierarchy, hospitals
from hierfl.method import Method
from hierfl.methods.about import names

T = TypeVar("T")


def method_of(text: str) -> Method:
    """Return a method of `hierfl.methods` for the demo's hierarchy, or a user's own "MODULE:NAME"."""
    if ":" in text:
        return _of_kind(Method, text, "a hierfl method")
    if text not in names():
        raise ValueError(
            f"there is no method '{text}': choose from {', '.join(sorted(names()))}, or name your "
            "own, MODULE:NAME"
        )
    try:
        built: Method = getattr(methods, text)(hierarchy(centered=True))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"'{text}' cannot be built for the demo's hierarchy ({error}): name a method of "
            "yours, MODULE:NAME"
        ) from error
    return built


def data_of(text: str | None) -> ClientData:
    """Return the data "MODULE:NAME"; None: the demo's hospitals."""
    if text is None:
        return hospitals()
    return _of_kind(ClientData, text, "a hierfl.ClientData")


def _of_kind(kind: type[T], text: str, what: str) -> T:
    held = imported(text)
    if not isinstance(held, kind):
        raise TypeError(f"'{text}' is a {type(held).__name__}: name {what}")
    return held
