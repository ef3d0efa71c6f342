"""Changes under which a posterior stays the same, though draws are on one side of them.

Components of a mixture may be exchanged, as may sites that a program samples one after the other,
and signs may change together, as of a signed scale and what it scales. Draws of one mode then look
as good as any. Changes are tried at one draw: densities that stay equal to rounding are no chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import constraints

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.posterior.client_loop import at_each_draw, draws_at_once, each_client
from hierfl.posterior.draws import Draws, in_program_shapes
from hierfl.posterior.snapshot import Snapshot, first_client
from hierfl.program.handlers import log_joint
from hierfl.program.program import Params
from hierfl.program.sites import LatentSite, Values, of_scalars

MOST = 4  # sites of which all subsets are tried
TRIED = 64  # subsets of sites whose signs change, of few sites first
APART = 0.5  # sds of a difference beyond which draws tell two sides apart
DIGITS = str.maketrans("", "", "0123456789")


class Swap(NamedTuple):
    """Components i and j of a site along a dimension; x and 1 - x of a share where `dim` is 0."""

    site: str
    dim: int
    i: int
    j: int

    def of(self, values: Values) -> Values:
        """Return what changes where the two are exchanged."""
        value = values[self.site]
        if not self.dim:
            return {self.site: 1.0 - value}
        order = torch.arange(value.shape[self.dim], device=value.device)
        order[self.i], order[self.j] = self.j, self.i
        return {self.site: value.index_select(self.dim, order)}


class Trade(NamedTuple):
    """Two sites that take each other's values."""

    site: str
    other: str

    def of(self, values: Values) -> Values:
        """Return what changes."""
        return {self.site: values[self.other], self.other: values[self.site]}


class Mirror(NamedTuple):
    """A site whose sign changes."""

    site: str

    def of(self, values: Values) -> Values:
        """Return what changes."""
        return {self.site: -values[self.site]}


Change = Swap | Trade | Mirror


class Symmetries(NamedTuple):
    """Names of sites of whose values draws show one side alone."""

    orders: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()


NO_SYMMETRY = Symmetries()


def symmetries(fit: Snapshot, drawn: Draws) -> Symmetries:
    """Return sites whose components, or whose signs, can be exchanged, and that draws tell apart all the same."""
    program = fit.program
    shared, own = in_program_shapes(program, drawn)
    every_draw = shared | {name: value.movedim(1, 0) for name, value in own.items()}
    sites = [site for site in program.latents.sites if site.name in every_draw]
    changes = [
        some
        for some in (*_exchanges(sites), *_mirrors(sites))
        if any(_told_apart(every_draw, change.of(every_draw)) for change in some)
    ]
    first = {name: value[0] for name, value in shared.items()}
    states = {name: value[:, 0] for name, value in own.items()}
    # what one client's rows tell apart takes no pass over all
    alone = {name: value[:1] for name, value in states.items()}
    held = _held(fit, first, states, _held(first_client(fit), first, alone, changes))
    # the shortest: what changes besides may be a symmetry of its own
    signs = [some for some in held if isinstance(some[0], Mirror)][:1]
    return Symmetries(
        _names(every_draw, [some for some in held if not isinstance(some[0], Mirror)]),
        _names(every_draw, signs),
    )


def _held(
    fit: Snapshot, first: Values, states: Values, changes: Sequence[Sequence[Change]]
) -> list[Sequence[Change]]:
    """Return the changes that leave all densities as they are at global values, and clients' own (N, ...)."""
    if not changes:
        return []
    program = fit.program

    def one(clients: int, params: Params, mine: ClientBatch, _: ClientBatch, state: Values) -> Tree:
        values = first | state
        ways = [values | _changed(values, some) for some in ((), *changes)]
        stacked = {name: torch.stack([way[name] for way in ways]) for name in values}

        def at(way: Tensor) -> Tree:
            values = {name: v.index_select(0, way.long()[None])[0] for name, v in stacked.items()}
            by_client, common = log_joint(program.model, values, mine, params)
            return {"each": by_client.sum(), "common": common}

        at_once = max(1, draws_at_once(mine.num_rows, program) // clients)
        return at_each_draw(at, len(ways), program, at_once=at_once)

    chunks = [chunk.found for chunk in each_client(fit, one, given=states, sized=True)]
    by_client = torch.cat([part["each"] for part in chunks])  # (N, ways)
    common = chunks[0]["common"][:1]
    densities = torch.cat([by_client, common])
    near = 1e-9 if densities.dtype == torch.float64 else 3e-6
    same = ((densities - densities[:, :1]).abs() <= near * (1.0 + densities[:, :1].abs())).all(0)
    return [some for some, equal in zip(changes, same[1:].tolist(), strict=True) if equal]


def _changed(values: Values, some: Sequence[Change]) -> Values:
    return {name: value for change in some for name, value in change.of(values).items()}


def _names(values: Values, held: Sequence[Sequence[Change]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in held for name in _changed(values, some)))


def _told_apart(draws: Values, changed: Mapping[str, Tensor]) -> bool:
    """Return whether draws (S, ...) of a site lie on one side of a change."""
    for name, value in changed.items():
        away = (draws[name] - value).double()
        if bool((away.mean(0).abs() > APART * away.std(0)).any()):
            return True
    return False


def _exchanges(sites: Sequence[LatentSite]) -> Iterator[tuple[Change, ...]]:
    """Yield exchanges of two neighbors, in some of the sites that have as many, with the largest sets first."""
    dims: dict[int, dict[str, int]] = {}
    unit = constraints.unit_interval
    shares = [site.name for site in sites if site.size == 1 and site.support is unit]
    for site in sites:
        shape = [*site.batch_shape, *site.event_shape]
        for count in set(shape) - {1}:
            if shape.count(count) == 1 and "." not in site.name:  # no network's weights
                dims.setdefault(count, {})[site.name] = shape.index(count) - len(shape)
    of_shares: list[Change] = [Swap(name, 0, 0, 1) for name in shares]
    for count, places in dims.items():
        for i in dict.fromkeys((0, count - 2)):
            swaps: list[Change] = [Swap(name, dim, i, i + 1) for name, dim in places.items()]
            yield from _subsets([*swaps, *of_shares] if count == 2 else swaps)
    numbered: dict[tuple[object, ...], list[str]] = {}  # by a loop, or by hand
    for site in sites:
        kind = site.name.translate(DIGITS), site.batch_shape, site.event_shape, repr(site.support)
        numbered.setdefault(kind, []).append(site.name)
    trades: list[Change] = [Trade(*names[:2]) for names in numbered.values() if len(names) > 1]
    if trades:
        yield from _subsets([*trades, *of_shares])


def _subsets(every: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    for count in range(len(every), 0, -1) if len(every) <= MOST else ():
        yield from combinations(every, count)


def _mirrors(sites: Sequence[LatentSite]) -> list[tuple[Change, ...]]:
    """Return changes of signs, of few sites first."""
    real = [
        Mirror(site.name)
        for site in sites
        if of_scalars(site.support) is constraints.real and "." not in site.name
    ]
    counts = range(1, min(MOST, len(real)) + 1)
    return list(islice(chain.from_iterable(combinations(real, n) for n in counts), TRIED))
