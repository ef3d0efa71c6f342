"""Draws of every client's sites, from the guide or the prior, and functions of draws."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.tables import Shown, printed
from hierfl.core.trees import Tree, tree_class, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import Chunk, draws_at_once, each_client, each_draw, what_is_read
from hierfl.posterior.snapshot import (
    Restricted,
    Snapshot,
    all_sites,
    by_state_alone,
    first_client,
    lacks_rows,
)
from hierfl.program.failures import root_of
from hierfl.program.handlers import NoKeyedDraw, NoSampler, Substitute
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import COMMON, LatentSite, Values
from hierfl.program.traces import Site
from hierfl.program.without_rows import values_of


def sites_of(shared: Values, own: Values) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the name, the level and the shape of each site."""
    return [
        *((name, "global", tuple(value.shape[1:])) for name, value in shared.items()),
        *((name, "local", tuple(value.shape[2:])) for name, value in own.items()),
    ]


@printed
@tree_class
class Draws:
    """S draws of global sites `shared` (S, *shape) and local sites `own` (S, N, *shape)."""

    shared: Values
    own: Values

    def __tables__(self) -> Shown:
        clients = next((f" of {value.shape[1]} clients" for value in self.own.values()), "")
        frame = pd.DataFrame(sites_of(self.shared, self.own), columns=["site", "level", "shape"])
        note = "fit.summary() shows statistics; .shared[site] and .own[site] are the tensors."
        return Shown(f"{self.count} draws{clients}", frame, note)

    @property
    def count(self) -> int:
        """S; 0 without sites."""
        return next((len(value) for value in self.sites.values()), 0)

    @property
    def sites(self) -> Values:
        """The draws of all sites."""
        return {**self.shared, **self.own}

    def some(self, which: slice | Tensor) -> "Draws":
        """Return some of the draws."""
        draws: Draws = tree_map(lambda value: value[which], self)
        return draws

    def only(self, names: Collection[str]) -> "Draws":
        """Return the draws of some sites."""
        levels = (self.shared, self.own)
        return Draws(*({n: v for n, v in of.items() if n in names} for of in levels))

    def is_fixed(self, site: LatentSite) -> bool:
        """Return whether a latent site is the same at all draws."""
        value = (self.own if site.is_local else self.shared)[site.name]
        return bool((value == value[:1]).all())


@one_at_a_time
def posterior_draws(
    fit: Snapshot, *, draws: int = 1000, seed: int = 0, keep: Collection[str] | None = None
) -> Draws:
    """Draw every latent site from the guide, or those in `keep`; clients share global draws."""
    fit = by_state_alone(fit)
    program = fit.program
    names = [name for name in all_sites(program) if keep is None or name in keep]

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Values:
        values = program.draw_all(params, own, batch)
        return {name: values[name] for name in names}

    how: dict[str, Any] = {"draws": draws, "seed": seed, "reads": what_is_read(program)}
    chunks = mapped_or_in_turn(fit, lambda s: each_draw(s, one, **how))
    return joined_draws(program, [chunk.found for chunk in chunks])


def known_sites(fit: Snapshot) -> frozenset[str]:
    """Return the names of the sites that can be drawn: all, but those that depend on missing rows."""
    if not lacks_rows(fit):
        return frozenset(all_sites(fit.program))
    first = by_state_alone(first_client(fit))
    names: set[str] = set()

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Values:
        names.update(first.program.draw_all(params, own, batch))
        return {}

    for _ in mapped_or_in_turn(first, lambda s: each_draw(s, one, draws=1, seed=0)):
        pass
    return frozenset(names)


@one_at_a_time
def prior_draws(fit: Snapshot, *, draws: int, seed: int) -> Draws:
    """Draw every site from the model's prior, at the fit's learned params; no row is read."""
    fit = by_state_alone(fit)
    program = fit.program
    names = all_sites(program)

    def one(params: Params, own: ClientBatch, batch: ClientBatch) -> Values:
        with Substitute(params, batch, reparameterized=False):
            nodes: dict[str, Site] = poutine.trace(program.model).get_trace(batch).nodes
        values = values_of(nodes, names)
        return {name: values[name] for name in names}

    chunks = mapped_or_in_turn(
        fit, lambda s: each_draw(s, one, draws=draws, seed=seed, salt="prior")
    )
    return joined_draws(program, [chunk.found for chunk in chunks])


def mapped_or_in_turn(fit: Snapshot, run: Callable[[Snapshot], Iterator[Chunk]]) -> Iterator[Chunk]:
    """Run a loop under `torch.vmap`, or one client and draw at a time where a distribution forbids vmap."""
    chunks = run(fit)
    try:
        first = next(chunks)
    except (NoKeyedDraw, RuntimeError) as error:
        # torch says so in words alone
        if not isinstance(error, NoKeyedDraw) and "vmap" not in str(error):
            raise
        program = replace(fit.program, keyed=False)
        federation = replace(fit.federation, program=program)
        chunks = run(Restricted(fit.method, federation, fit.progress, fit.message))
        try:
            first = next(chunks)
        except NoSampler as lacking:
            raise ProgramError(
                f"{root_of(lacking)} cannot be drawn from its prior: use a prior that has a sampler"
            ) from error
    yield first
    yield from chunks


def at_draws(
    fit: Snapshot,
    draws: Draws,
    function: Callable[[Params, Values, ClientBatch], Tree],
    *,
    rows: ClientData | None = None,
) -> Iterator[Chunk]:
    """Evaluate `function(params, latent sites, rows)` at given draws: chunks of trees (C, S, ...)."""
    shared, own = in_program_shapes(fit.program, draws)
    count = draws.count or 1

    def run(snapshot: Snapshot) -> Iterator[Chunk]:
        def all_draws(
            clients: int, params: Params, _: ClientBatch, batch: ClientBatch, given: Values
        ) -> Tree:
            values, index = {**given, **shared}, torch.arange(count, dtype=torch.int32)

            def at(draw: Tensor, latents: Values) -> Tree:
                return function(params, latents, batch.redrawn(draw))

            if snapshot.program.in_vmap:
                at_once = max(1, draws_at_once(batch.num_rows, snapshot.program) // clients)
                return torch.vmap(at, chunk_size=at_once)(index, values)
            trees = [at(index[s], {n: v[s] for n, v in values.items()}) for s in range(count)]
            return tree_map(lambda *v: torch.stack(v), *trees)

        return each_client(snapshot, all_draws, rows=rows, given=own, sized=True)

    yield from mapped_or_in_turn(fit, run)


def local_plates(program: Program) -> dict[str, int]:
    """Return local sites: name -> how many plates lie left of the clients plate."""
    local = {s.name: len(s.batch_shape) - 2 for s in program.latents.sites if s.is_local}
    return local | {name: plates for name, plates in program.derived.items() if plates is not None}


def joined_draws(program: Program, chunks: Sequence[Values]) -> Draws:
    """Join the draws of chunks of clients, site -> (C, S, ...) each, into those of all clients."""
    own = joined_local(program, chunks)
    return Draws({name: value[0] for name, value in chunks[0].items() if name not in own}, own)


def joined_local(program: Program, chunks: Sequence[Values]) -> Values:
    """Join the draws of local sites: (S, N, *plates, *event)."""
    own = {}
    for name, plates in local_plates(program).items():
        if name in chunks[0]:
            value = torch.cat([part[name] for part in chunks])  # (N, S, *plates, 1, 1, *event)
            own[name] = value.squeeze(2 + plates).squeeze(2 + plates).movedim(0, 1)
    return own


def in_program_shapes(program: Program, draws: Draws) -> tuple[Values, Values]:
    """Return sites in a program's shapes: (S, *shape), local (N, S, *plates, 1, 1, *event)."""
    plates, sites = local_plates(program), program.latents.sites
    own = {s.name: draws.own[s.name].movedim(1, 0) for s in sites if s.is_local}
    for name, value in own.items():
        own[name] = value.unsqueeze(2 + plates[name]).unsqueeze(2 + plates[name])
    names = (s.name for s in sites if not s.is_local and s.name != COMMON)
    return {name: draws.shared[name] for name in names}, own


@spelled
def get_samples(fit: Snapshot, *, draws: int = 1000, seed: int = 0) -> Values:
    """Draw the latent sites in the shapes of the program, as `pyro.infer.Predictive` takes them.

    A local site is (S, *plates, N, 1, *event), for the N clients of `hierfl.full_batch(data)`:

        >>> model = pyro.poutine.uncondition(fit.program.model)  # doctest: +SKIP
        >>> Predictive(model, fit.get_samples())(hierfl.full_batch(data))["y"]  # doctest: +SKIP

    Args:
        fit: whose posterior is drawn from.
        draws: S.
        seed: of the draws.
    """
    return samples_of(fit.program, posterior_draws(fit, draws=draws, seed=seed))


def samples_of(program: Program, drawn: Draws) -> Values:
    """Return draws in the shapes of the program, (S, *plates, N, 1, *event)."""
    samples, plates = dict(drawn.shared), local_plates(program)
    for name, value in drawn.own.items():  # (S, N, *plates, *event)
        samples[name] = value.movedim(1, 1 + plates[name]).unsqueeze(2 + plates[name])
    return samples


def draws_of_samples(program: Program, samples: Mapping[str, Tensor]) -> Draws:
    """Return samples in the shapes of the program, (S, *plates, N, 1, *event), as draws."""
    plates = {name: of for name, of in local_plates(program).items() if name in samples}
    own = {n: samples[n].movedim(1 + of, 1).squeeze(2 + of) for n, of in plates.items()}
    return Draws({n: value for n, value in samples.items() if n not in own}, own)
