"""The check that a user's rows are `ClientData`, with the constructor that makes them so."""

from __future__ import annotations

from typing import Any

from hierfl.data.clients import ClientData

_MENDS = {
    "DataFrame": "ClientData.from_frame(frame, 'client', x=[...], y=...)",
    "dict": "ClientData.from_clients(...), or from_arrays(client_id, x=..., y=...)",
}


def expect_client_data(value: Any, what: str) -> ClientData:
    """Return `value`, which must be `ClientData`.

    Args:
        value: as a user passes it.
        what: name of the argument.

    Raises:
        TypeError: it is something else; the message names the constructor that takes it.
    """
    if isinstance(value, ClientData):
        return value
    kind = type(value).__name__
    mend = _MENDS.get(kind, "ClientData.from_arrays(client_id, x=..., y=...)")
    raise TypeError(f"{what} is a {kind}, not ClientData: make it with {mend}")
