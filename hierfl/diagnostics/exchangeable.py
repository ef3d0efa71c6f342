"""Components that can be exchanged, such as those of a mixture, of which draws show one order."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import constraints

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, each_client
from hierfl.posterior.draws import Draws, in_program_shapes
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.handlers import log_joint
from hierfl.program.program import Params
from hierfl.program.sites import LatentSite, Values

MOST = 4  # sites of which all subsets are tried
APART = 0.5  # sds of a difference beyond which draws tell two components apart


class Swap(NamedTuple):
    """Components i and j of a site along a dimension; x and 1 - x of a share where `dim` is 0."""

    site: str
    dim: int
    i: int
    j: int

    def of(self, value: Tensor) -> Tensor:
        """Return a site's value with the two exchanged."""
        if not self.dim:
            return 1.0 - value
        order = torch.arange(value.shape[self.dim], device=value.device)
        order[self.i], order[self.j] = self.j, self.i
        return value.index_select(self.dim, order)

    def told_apart(self, value: Tensor) -> bool:
        """Return whether draws (S, ...) of the site put one of the two above the other."""
        away = (value - self.of(value)).double()
        return bool((away.mean(0).abs() > APART * away.std(0)).any())


def exchangeable(fit: Snapshot, drawn: Draws) -> tuple[str, ...]:
    """Return sites whose components can be exchanged, all at once, and that draws tell apart all the same."""
    program = fit.program
    shared, own = in_program_shapes(program, drawn)
    every_draw = shared | {name: value.movedim(1, 0) for name, value in own.items()}
    swaps = [
        some
        for every in _swaps(program.latents.sites)
        for count in range(len(every), 0, -1)
        for some in combinations(every, count)
        if any(swap.told_apart(every_draw[swap.site]) for swap in some)
    ]
    if not swaps:
        return ()
    first = {name: value[0] for name, value in shared.items()}
    states = {name: value[:, 0] for name, value in own.items()}

    def one(params: Params, mine: ClientBatch, _: ClientBatch, state: Values) -> Tree:
        values = first | state
        ways = [values | {s.site: s.of(values[s.site]) for s in some} for some in ((), *swaps)]
        stacked = {name: torch.stack([way[name] for way in ways]) for name in ways[0]}

        def at(way: Tensor) -> Tree:
            values = {name: v.index_select(0, way.long()[None])[0] for name, v in stacked.items()}
            by_client, common = log_joint(program.model, values, mine, params)
            return {"each": by_client.sum(), "common": common}

        return at_each_draw(at, len(ways), program)

    chunks = [chunk.found for chunk in each_client(fit, one, given=states)]
    by_client = torch.cat([part["each"] for part in chunks])  # (N, ways)
    common = chunks[0]["common"][:1]
    densities = torch.cat([by_client, common])
    near = 1e-9 if densities.dtype == torch.float64 else 3e-6
    same = ((densities - densities[:, :1]).abs() <= near * (1.0 + densities[:, :1].abs())).all(0)
    held = [some for some, equal in zip(swaps, same[1:].tolist(), strict=True) if equal]
    return tuple(dict.fromkeys(swap.site for some in held for swap in some))


def _swaps(sites: Sequence[LatentSite]) -> Iterator[list[Swap]]:
    """Yield, for each number of components, exchanges of two neighbors in every site that has so many."""
    dims: dict[int, dict[str, int]] = {}
    unit = constraints.unit_interval
    shares = [site.name for site in sites if site.size == 1 and site.support is unit]
    for site in sites:
        shape = [*site.batch_shape, *site.event_shape]
        for count in set(shape) - {1}:
            if shape.count(count) == 1 and "." not in site.name:  # no network's weights
                dims.setdefault(count, {})[site.name] = shape.index(count) - len(shape)
    for count, places in dims.items():
        share_swaps = [Swap(name, 0, 0, 1) for name in shares] if count == 2 else []
        for i in dict.fromkeys((0, count - 2)):
            every = [Swap(name, dim, i, i + 1) for name, dim in places.items()] + share_swaps
            if len(every) <= MOST:
                yield every
