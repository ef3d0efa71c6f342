"""Draws of every client's sites: from the guide, from the prior, and functions of draws that are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pyro import poutine

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import (
    CLIENT_DRAWS_AT_ONCE,
    CLIENTS_AT_ONCE,
    Chunk,
    each_client,
    each_draw,
)
from hierfl.posterior.snapshot import Restricted, Snapshot
from hierfl.posterior.without_rows import (
    by_state_alone,
    global_sites,
    lacks_rows,
    the_same_for_any_rows,
)
from hierfl.program.handlers import Answer
from hierfl.program.keyed_draws import NoKeyedDraw
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site


@dataclass(frozen=True, eq=False)
class Draws:
    """S draws of the latent and deterministic sites.

    Args:
        shared: global site -> (S, *shape).
        own: local site -> (S, N, *shape of one client's).
    """

    shared: Values
    own: Values


@one_at_a_time
def posterior_draws(
    fit: Snapshot, *, draws: int = 1000, seed: int = 0, keep: Collection[str] | None = None
) -> Draws:
    """Draw every latent site from the guide; clients draw their own given the global draws they all share.

    Args:
        fit: a run at some round.
        draws: S.
        seed: of the draws.
        keep: the sites to keep of those that are drawn; None: all.
    """
    program = fit.program
    if lacks_rows(fit):
        if keep is None or not set(keep) <= global_sites(program):
            by_state_alone(fit)  # refuses a guide that reads rows
        again = partial(posterior_draws, draws=draws, seed=seed, keep=keep)
        return the_same_for_any_rows(fit, again, lambda found: [found.shared, found.own])

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Values:
        values = program.draw(params, own)
        values = {**values, **program.derive(values, params, asked)}
        return values if keep is None else {n: v for n, v in values.items() if n in keep}

    return joined_draws(program, [c.found for c in each_draw(fit, one, draws=draws, seed=seed)])


@one_at_a_time
def prior_draws(fit: Snapshot, *, draws: int, seed: int) -> Draws:
    """Draw every site from the model: the global sites, then each client's own given those; no row is read.

    Args:
        fit: whose learned params the prior takes where it has any.
        draws: S.
        seed: of the draws.
    """
    program = fit.program
    if lacks_rows(fit):
        again = partial(prior_draws, draws=draws, seed=seed)
        return the_same_for_any_rows(fit, again, lambda found: [found.shared, found.own])
    names = (*(site.name for site in program.latents.sites), *program.derived)

    def one(params: Params, own: ClientBatch, asked: ClientBatch) -> Values:
        with Answer(params, asked):
            nodes: dict[str, Site] = poutine.trace(program.model).get_trace(asked).nodes
        return {name: nodes[name]["value"] for name in names}

    chunks = keyed_or_in_turn(
        fit, lambda s: each_draw(s, one, draws=draws, seed=seed, salt="prior")
    )
    return joined_draws(program, [chunk.found for chunk in chunks])


def keyed_or_in_turn(fit: Snapshot, run: Callable[[Snapshot], Iterator[Chunk]]) -> list[Chunk]:
    """Run a loop over clients under `torch.vmap`; where a site has no keyed draw, a client and a draw at a time.

    A prior may hold a Gamma, say, which torch draws itself: not under `torch.vmap`.
    """
    try:
        return list(run(fit))
    except NoKeyedDraw:
        program = replace(fit.program, keyed=False)
        federation = replace(fit.federation, program=program)
        return list(run(Restricted(fit.method, federation, fit.progress, fit.message)))


def at_draws(
    fit: Snapshot,
    draws: Draws,
    one: Callable[[Params, Values, ClientBatch], Tree],
    *,
    rows: ClientData | None = None,
) -> Iterator[Chunk]:
    """Evaluate a function at draws that are given: chunks of trees (C, S, ...). The guide is not run.

    Args:
        fit: of the clients that the draws are of.
        draws: of every latent site.
        one: `(params, latent sites, rows asked about) -> tree`, of one client and one draw.
        rows: asked about; None: the clients' training rows.
    """
    shared, own = in_program_shapes(fit.program, draws)
    clients = min(fit.federation.slots, CLIENTS_AT_ONCE, len(fit.clients))
    at_once = max(1, CLIENT_DRAWS_AT_ONCE // clients)

    def all_draws(params: Params, _: ClientBatch, asked: ClientBatch, given: Values) -> Tree:
        at_draw = torch.vmap(lambda values: one(params, values, asked), chunk_size=at_once)
        return at_draw({**given, **shared})

    yield from each_client(fit, all_draws, rows=rows, given=own)


# ------------------------------------------------------------------------------------------------ shapes
def local_plates(program: Program) -> dict[str, int]:
    """Local sites, latent and deterministic: name -> how many plates lie left of the clients plate."""
    local = {s.name: len(s.batch_shape) - 2 for s in program.latents.sites if s.is_local}
    return local | {name: plates for name, plates in program.derived.items() if plates is not None}


def joined_draws(program: Program, parts: Sequence[Values]) -> Draws:
    """Join the draws of chunks of clients, site -> (C, S, ...) each, into those of all clients."""
    own = joined_local(program, parts)
    return Draws({name: value[0] for name, value in parts[0].items() if name not in own}, own)


def joined_local(program: Program, parts: Sequence[Values]) -> Values:
    """Join the draws of local sites: (S, N, *plates, *event)."""
    own = {}
    for name, plates in local_plates(program).items():
        if name in parts[0]:
            value = torch.cat([part[name] for part in parts])  # (N, S, *plates, 1, 1, *event)
            own[name] = value.squeeze(2 + plates).squeeze(2 + plates).movedim(0, 1)
    return own


def in_program_shapes(program: Program, draws: Draws) -> tuple[Values, Values]:
    """Latent sites in a program's own shapes: global (S, *shape), local (N, S, *plates, 1, 1, *event)."""
    plates, sites = local_plates(program), program.latents.sites
    own = {s.name: draws.own[s.name].movedim(1, 0) for s in sites if s.is_local}
    for name, value in own.items():
        own[name] = value.unsqueeze(2 + plates[name]).unsqueeze(2 + plates[name])
    return {s.name: draws.shared[s.name] for s in sites if not s.is_local}, own
