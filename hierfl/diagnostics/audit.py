"""What crosses between the server and a client, and what of it depends on its rows."""

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import named_leaves, tree_map
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import Done, Task, client_round, work_on
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import begin
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Each, Method

FEW = 3  # rounds of a method that runs for as many rounds as asked
COLUMNS = ["direction", "name", "shape", "numbers", "bytes", "rounds", "server sees", "depends on"]


class Place(NamedTuple):
    """Where a tensor crosses: "down", "mail" to this client, or "up"; the server sees it or "a sum"."""

    direction: str
    name: str
    seen: str


class _Seen(Exception):
    """All messages of the client have been listed."""


Crossed = dict[Place, dict[int, Tensor]]  # -> round -> the tensor


@dataclass(frozen=True, eq=False)
class Audit:
    """Everything that crosses in a run.

    Args:
        table: one row per tensor: "direction" ("down", to every client of the round; "mail", to this
            client alone; "up"), "name", "shape", "numbers", "bytes", "rounds" (the first and the
            last one, from 0), "server sees" ("a sum" over the round's clients, or "by itself"; ""
            of what the server sends), and "depends on": "its rows" where it is another tensor for
            other rows, "how many" where it is their number, else "".
        client: whose messages these are.
        rows: how many rows it has.
        values: how many scalars its rows hold.
        rounds: how many were run.
    """

    table: pd.DataFrame
    client: str
    rows: int
    values: int
    rounds: int

    @property
    def sent(self) -> int:
        """How many numbers that depend on the client's rows it sent, over all rounds."""
        table = self.table
        up = table[(table["direction"] == "up") & (table["depends on"] == "its rows")]
        return int((up["numbers"] * up["times"]).sum())

    @property
    def reading(self) -> str:
        """How many numbers it comes to, in a sentence."""
        return (
            f"In {self.rounds} round{'s' * (self.rounds > 1)}, client '{self.client}' sent "
            f"{self.sent} numbers that depend on its {self.rows} rows, which hold {self.values}."
        )

    def __str__(self) -> str:
        """The table, and how many numbers it comes to."""
        return f"{self.table[COLUMNS].to_string(index=False)}\n{self.reading}"


@one_at_a_time
def audit(
    method: Method,
    data: ClientData,
    *,
    client: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
) -> Audit:
    """Run a method with and without one client's own rows; list what crosses to and from it.

    What is the same in both runs does not depend on the client's rows; what differs may tell of
    them. In the second run the client has rows and client fields of other clients, in the same
    number. All clients take part in each round.

    A number that depends on the rows need not give them away, and the table does not say what can
    be learned from many numbers together: see docs/disclosure.md.

    Args:
        method: to run.
        data: two clients or more.
        client: whose messages are listed. Default None: the client with the fewest rows.
        rounds: at most. Default None: until the method is done, or 3 of one that does not stop
            automatically.
        seed: of both runs.

    Raises:
        KeyError: there is no such client.
        ValueError: there is one client alone; or the others' rows are those of the client.
    """
    if data.num_clients < 2:
        raise ValueError(
            "one client's rows are exchanged for those of others, and there are none: audit two "
            "clients or more"
        )
    name = client if client is not None else data.names[int(data.counts.argmin())]
    if name not in data.names:
        raise NoSuchName(f"there is no client '{name}'; choose from {', '.join(data.names[:10])}")
    at = data.names.index(name)
    until = rounds if rounds is not None else method.most_rounds or FEW
    as_is, changed = (
        _crossings(federate(method, each, seed=seed), at, until)
        for each in (data, _exchanged(data, at))
    )
    count = int(data.counts[at])
    table = pd.DataFrame(
        [_row(place, as_is[place], changed.get(place, {}), count) for place in as_is]
    )
    values = count * sum(v[0].numel() for v in data.fields.values())
    done = 1 + max(round_ for each in as_is.values() for round_ in each)
    return Audit(table, name, count, values, done)


def _exchanged(data: ClientData, at: int) -> ClientData:
    here = data.row_client == at
    others = (~here).nonzero()[:, 0]
    count = int(here.sum())
    taken = others[torch.arange(count) * max(1, len(others) // count) % len(others)]
    other = (at + 1) % data.num_clients

    def changed(values: Tensor, where: Any, source: Any) -> Tensor:
        copy = values.clone()
        copy[where] = values[source]
        return copy

    fields = {name: changed(v, here, taken) for name, v in data.fields.items()}
    client_fields = {name: changed(v, at, other) for name, v in data.client_fields.items()}
    if all(torch.equal(v, data.fields[name]) for name, v in fields.items()):
        raise ValueError(
            f"the rows of client '{data.names[at]}' are those of the other clients, so that "
            "nothing would differ: audit another client"
        )
    return replace(data, fields=fields, client_fields=client_fields)


def _crossings(federation: Federation, at: int, until: int) -> Crossed:
    crossed: Crossed = {}

    def work(tasks: Iterable[Task]) -> Iterator[Done]:
        for task in tasks:
            places = (task.ids == at).nonzero()[:, 0]
            if len(places):
                for place, tensor in _of_round(federation, task, places):
                    crossed.setdefault(place, {})[task.round] = tensor.detach().clone()
                if task.round + 1 == until:
                    raise _Seen  # nothing crosses after the last round: others need not finish it
            yield work_on(federation, federation.client.phases, task)

    with suppress(_Seen), closing(run_rounds(federation, begin(federation), until, work)) as each:
        for _ in each:
            pass
    return crossed


def _of_round(federation: Federation, task: Task, places: Tensor) -> Iterator[tuple[Place, Tensor]]:
    own, ids = tree_map(lambda v: v[places].clone(), task.own), task.ids[places]
    for path, leaf in named_leaves(task.message).items():
        yield Place("down", _words(path), ""), leaf
    if federation.server.mail is not None:
        for path, leaf in named_leaves(federation.client.mail_in(own)).items():
            yield Place("mail", _words(path), ""), leaf[0]
    phases, message = federation.client.phases, task.message
    up, _ = client_round(federation, phases, message, own, ids, task.round)
    for name, share in up.items():
        seen = "by itself" if isinstance(share, Each) else "a sum"
        for path, leaf in named_leaves(share).items():
            yield Place("up", _words(f"{name}{path}"), seen), leaf[0]


def _words(path: str) -> str:
    """Return a path such as "theta.value['0.weight']" as "theta.value 0.weight"."""
    return path.replace("['", " ").replace("']", "").replace("  ", " ").strip()


def _row(
    place: Place, here: dict[int, Tensor], there: dict[int, Tensor], count: int
) -> dict[str, Any]:
    """Return the row of a tensor in the table, from both runs and the client's number of rows."""
    first = next(iter(here.values()))
    differs = here.keys() != there.keys() or any(
        not torch.equal(here[r].nan_to_num(), there[r].nan_to_num()) for r in here
    )
    is_count = place.direction == "up" and all(
        v.numel() == 1 and float(v) == count for v in here.values()
    )
    values = [
        place.direction,
        place.name,
        tuple(first.shape),
        first.numel(),
        first.nbytes,
        f"{min(here)}-{max(here)}" if len(here) > 1 else str(min(here)),
        place.seen,
        "its rows" if differs else "how many" if is_count else "",
    ]
    return dict(zip(COLUMNS, values, strict=True)) | {"times": len(here)}
