"""A server whose update fails with some client's update goes on without that client, which is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_leaves
from hierfl.engine.aggregate import Sums, means_of
from hierfl.engine.chunks import FAILURES
from hierfl.method import Clock, Server, Up
from hierfl.nodes.messages import Refused, check_numbers

WHY = "with its update the server's own fails, and without it it does not"


@dataclass
class LatestRound:
    """A round's updates, by place; `left_out` is the client that alone makes the server's fail."""

    ups: Mapping[int, Up] = field(default_factory=dict)
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    summed: Callable[[Mapping[int, Up]], Sums] = lambda ups: {}
    left_out: int | None = None


def leaving_one_out(server: Server, latest: LatestRound) -> Server:
    """Return a server that updates its state without one client where it fails with all."""

    def next_state(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        found = server.update(state, means, clock)
        if not server.finished(found):  # what nodes would refuse
            check_numbers(server.down(found, clock._replace(round=clock.round + 1)))
            check_numbers(server.mail(found) if server.mail else {})
        return found

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        latest.left_out = None
        try:
            return next_state(state, means, clock)
        except FAILURES as error:
            places = sorted(latest.ups, key=lambda one: -_largest(latest.ups[one]))
            for place in places if len(places) > 1 else ():
                others = {one: up for one, up in latest.ups.items() if one != place}
                client = int(latest.ids[place])
                lost = tuple(sorted((*clock.left_out, client)))
                at = clock._replace(clients=clock.clients - 1, left_out=lost)
                with suppress(*FAILURES):
                    found = next_state(state, means_of(latest.summed(others)), at)
                    latest.left_out = client
                    return found
            if isinstance(error, Refused):  # by the nodes, who then say so of themselves
                return server.update(state, means, clock)
            raise

    return replace(server, update=update)


def _largest(up: Up) -> float:
    return max((float(v.double().abs().max()) for v in tree_leaves(up) if v.numel()), default=0.0)
