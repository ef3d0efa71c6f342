"""How a server asks nodes, and what it knows about client states without having them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.engine.federation import Federation

Round = Annotated[int, Meta(ge=0, lt=1 << 31)]
Counted = Annotated[int, Meta(ge=-1, lt=1 << 31)]  # -1: in no round
# of answers about the client; "imputed" never leaves: it has a value of each row
AfterKind = Literal["summaries", "draws", "predictions", "scores", "imputed"]
AFTER: tuple[str, ...] = get_args(AfterKind)
ROUND = "round"  # kind of a request in the rounds; others are questions
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


@dataclass(frozen=True)
class RoundRequest:
    """A client's update in a round of a run; it was last counted in round `counted`."""

    run: str
    round: Round
    counted: Counted
    kind: Literal["round"] = "round"


@dataclass(frozen=True)
class StateRequest:
    """An answer about a client under the state after `rounds` rounds, which may be that of the run's end."""

    kind: AfterKind | Literal["end"]
    run: str
    rounds: Round
    counted: Counted
    ends: bool
    draws: Annotated[int, Meta(ge=1, le=100_000)] = 1
    seed: Annotated[int, Meta(gt=-(1 << 63), le=(1 << 63) - 1)] = 0
    site: str | None = None


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
