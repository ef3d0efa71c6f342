"""Answers of nodes by the names of their clients, as a server reads them before the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hierfl.nodes.agreement import client_name
from hierfl.nodes.messages import Refused, read_json

MOST = 1 << 26  # bytes of an answer
Key = TypeVar("Key")  # of a node, to the transport
Value = TypeVar("Value")


def named_answers(
    answers: Mapping[Key, bytes], read: Callable[[str, Any], Value], left_out: dict[Key, str]
) -> tuple[dict[str, Value], dict[str, Key]]:
    """Return each client's answer, sorted by name, and its node; add to `left_out` why others' are refused.

    `read` takes the name of a client and its answer's JSON.
    """
    clients: dict[Key, str] = {}
    values: dict[Key, Value] = {}
    for key, content in answers.items():
        try:
            parts = read_json(content, MOST)
            if not isinstance(parts, dict) or parts.keys() != {"client", "answer"}:
                raise Refused("it answers without the name of its client")
            client = client_name(parts["client"])
            clients[key], values[key] = client, read(client, parts["answer"])
        except ValueError as error:
            left_out.setdefault(key, str(error)[:500])
    for key, why in of_one_name({key: clients[key] for key in values}).items():
        left_out.setdefault(key, why)
    keys = {clients[key]: key for key in values if key not in left_out}
    return {client: values[keys[client]] for client in sorted(keys)}, keys


def of_one_name(clients: Mapping[Key, str]) -> dict[Key, str]:
    """Return the nodes that have a client of one name, but for one whose own key is that name."""
    out = {}
    for node, client in clients.items():
        others = [
            str(other)[:40] for other, of in clients.items() if of == client and other != node
        ]
        if others and str(node) != client:
            out[node] = f"it introduces client '{client}', and so does {', '.join(others)}"
    return out
