"""What a server checks of updates beside their form; a client that fails, or whose update does, is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hierfl.core.trees import Tree, restored, tree_leaves
from hierfl.engine.aggregate import Sums, means_of
from hierfl.engine.chunks import FAILURES
from hierfl.engine.federation import Federation
from hierfl.method import Client, Clock, Each, LogShare, Server, Share, Up
from hierfl.nodes.messages import Refused, check_numbers, like

FEWEST = 4  # updates that can be compared with each other
FAR = 1e6  # times the others' median size, and at least as large as this
WHY = "with its update the server's own fails, and without it it does not"


def check_message(federation: Federation, method: str, message: Tree) -> None:
    """Refuse a message of a round that the method's own server would not send: at nodes, and before it is sent."""
    server, refuses = federation.server, federation.client.refuses
    first = server.down(server.state, Clock(0, 1))
    check_numbers(message)
    if refuses is None:
        like(message, first)
    elif why := refuses(message, first) if isinstance(message, dict) else "it is not a dict":
        raise Refused(f"its message is not of method '{method}': {why}")


def check_update(server: Server, client: Client, message: Tree, up: Up, rows: int) -> None:
    """Refuse an update of one client that no honest client with so many rows sends."""
    plain = restored(up)
    check_numbers(plain)
    for why in filter(None, _wrong(server, client, message, plain, rows)):
        raise Refused(why)


def _wrong(
    server: Server, client: Client, message: Tree, plain: Up, rows: int
) -> Iterator[str | None]:
    """Yield why no honest client sends an update."""
    largest = max(1.0, float(rows))  # rows that its steps go through
    for phase in client.phases:
        batch = rows if phase.batch_size is None or phase.unit == "epoch" else phase.batch_size
        largest = max(largest, float(phase.count * batch))
    for name, share in plain.items():
        weight = getattr(share, "weight", None)
        low, high = map(float, weight.aminmax()) if isinstance(weight, Tensor) else (0.0, 0.0)
        if low < 0.0 or high > largest * (1.0 + 1e-6):
            size = low if low < 0.0 else high
            yield f"the weight of {name} is {size:g}: of {rows} rows it is 0 to {largest:g}"
    shares = [share for share in plain.values() if isinstance(share, Share)]
    if len(shares) == len(plain) and not any(float(_weight_of(share)) > 0.0 for share in shares):
        yield "its update has no weight"
    if server.wrong is not None:
        try:
            yield server.wrong(message, plain, rows)
        except Exception as error:
            yield f"its update cannot be checked ({type(error).__name__})"


def unlike_others(ups: Mapping[int, Up], rows: Mapping[int, int]) -> dict[int, str]:
    """Return the places of updates that differ from most others' in weight or size, and why."""
    unlike: dict[int, str] = {}
    if len(ups) < FEWEST:
        return unlike
    places, count = list(ups), torch.tensor([float(rows[place]) for place in ups])
    for name in ups[places[0]]:
        shares = [restored(ups[place][name]) for place in places]
        weights = torch.stack([_weight_of(share) for share in shares])
        for usual in (torch.ones_like(count), count):
            if 2 * int((weights == usual).sum()) > len(places):
                for k in ((weights != usual) & (weights != 0.0)).nonzero()[:, 0].tolist():
                    why = f"the weight of {name} is {float(weights[k]):g}, not {float(usual[k]):g}"
                    unlike.setdefault(places[k], f"{why} as those of others")
                break
        leaves = [[v.double().flatten() for v in tree_leaves(share.value)] for share in shares]
        norms = torch.stack([torch.cat([torch.zeros(1).double(), *of]).norm() for of in leaves])
        norms = norms / weights.clamp(min=1.0)
        # of sums over rows, or of means: what is usual in one of the two is not far
        far = torch.ones(len(places), dtype=torch.bool)
        for sizes in (norms, norms / count * count.median()):
            far &= sizes > FAR * sizes.median().clamp(min=1.0)
        for k in far.nonzero()[:, 0].tolist():
            times = float(norms[k]) / max(1.0, float(norms.median()))
            unlike.setdefault(places[k], f"its {name} is {times:.1e} times as large as others'")
    return unlike


def _weight_of(share: Share | LogShare | Each) -> Tensor:
    return torch.as_tensor(share.weight if isinstance(share, Share) else 1.0).float().reshape(())


@dataclass
class LatestRound:
    """A round's updates, by place; `left_out` is the client that alone makes the server's fail."""

    ups: Mapping[int, Up] = field(default_factory=dict)
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    summed: Callable[[Mapping[int, Up]], Sums] = lambda ups: {}
    left_out: int | None = None


def without_one(federation: Federation, method: str, latest: LatestRound) -> Federation:
    """Return a federation whose server updates its state without one client where it fails with all."""
    server = federation.server

    def next_state(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        after = server.update(state, means, clock)
        if not server.finished(after):  # what nodes would refuse
            message = server.down(after, clock._replace(round=clock.round + 1))
            check_message(federation, method, message)
            check_numbers(server.mail(after) if server.mail else {})
        return after

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        latest.left_out = None
        try:
            return next_state(state, means, clock)
        except FAILURES as error:
            places = sorted(latest.ups, key=lambda place: -_largest(latest.ups[place]))
            for place in places if len(places) > 1 else ():
                others = {other: up for other, up in latest.ups.items() if other != place}
                client = int(latest.ids[place])
                lost = tuple(sorted((*clock.left_out, client)))
                at = clock._replace(clients=clock.clients - 1, left_out=lost)
                with suppress(*FAILURES):
                    after = next_state(state, means_of(latest.summed(others)), at)
                    latest.left_out = client
                    return after
            if isinstance(error, Refused):  # by the nodes, who then say so of themselves
                return server.update(state, means, clock)
            raise

    return replace(federation, server=replace(server, update=update))


def _largest(up: Up) -> float:
    return max((float(v.double().abs().max()) for v in tree_leaves(up) if v.numel()), default=0.0)
