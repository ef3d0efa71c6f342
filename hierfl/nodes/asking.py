"""How a server asks nodes, and what it knows about client states without having them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.engine.federation import Federation

COUNTED = "counted"  # of the history: in which round each client that stayed was last counted


class Answer(NamedTuple):
    """What came back from a node.

    client: the name of its client.
    content: the bytes; None: there are none.
    reason: why there are none.
    """

    client: str
    content: bytes | None
    reason: str = ""


Ask = Callable[[Mapping[str, bytes]], Iterable[Answer]]


def last_counted(federation: Federation, history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last round in which each client was counted, without clients that never were."""
    data, found = federation.data, dict[str, int]()
    for record in history:
        if COUNTED in record:  # a client has left: no round was run
            found = {one["client"]: int(one["round"]) for one in record[COUNTED]}
            continue
        ids = noise.cohort(federation.seed, record["round"], data.num_clients, federation.cohort)
        left_out = {one["client"] for one in record.get("left_out", ())}
        cohort = {data.names[int(i)] for i in data.by_name[ids]}
        found.update(dict.fromkeys(cohort - left_out, int(record["round"])))
    return found


def mail_of(own: Tree, place: int) -> Tree:
    """Return what the server has for the client at a place of the states, `own`; {}: nothing."""
    if isinstance(own, Mapping) and "mail" in own:
        return tree_map(lambda v: v[place], own["mail"])
    return {}
