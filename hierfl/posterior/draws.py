"""From a finished run to draws: of every client's sites, and of what they say of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import pyro
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import Table, taken
from hierfl.engine.federation import Federation
from hierfl.engine.over_clients import one_slot, over_clients, slots_of
from hierfl.posterior.prediction import Prediction, averaged, gathered, kind_of, moments
from hierfl.program.handlers import Answer
from hierfl.program.keyed_draws import NoKeyedDraw
from hierfl.program.program import Params, Program
from hierfl.program.sites import Values
from hierfl.program.traces import Site

SLOTS, AT_ONCE, ROWS_AT_ONCE = (
    64,
    512,
    1 << 21,
)  # clients, clients x draws, and those x rows of wide work, carried at once


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of the posterior: `shared` site -> (S, *shape); `own` site -> (S, N, *shape of one client's)."""

    shared: Values
    own: Values


def posterior_draws(
    federation: Federation,
    message: Tree,
    table: Table,
    *,
    draws: int,
    seed: int,
    keep: Collection[str] | None = None,
) -> Draws:
    """Draw every latent site; each client draws its own, given the draws of the global sites that all share.

    Of those drawn, the sites in `keep` are kept (None: all).
    """
    program = federation.program

    def draw(params: Params, batch: ClientBatch, asked: ClientBatch) -> Values:
        values = program.draw(params, batch)
        values = {**values, **program.derive(values, params, asked)}
        return (
            values
            if keep is None
            else {name: value for name, value in values.items() if name in keep}
        )

    return together(
        program,
        [v for _, v in each_client(federation, message, table, draw, draws=draws, seed=seed)],
    )


def prior_draws(
    federation: Federation, message: Tree, table: Table, *, draws: int, seed: int
) -> Draws:
    """Draws of every site from the model itself, a client's own given the global ones, whatever its rows say."""
    program = federation.program

    def draw(params: Params, batch: ClientBatch, asked: ClientBatch) -> Values:
        with Answer(params, asked):
            nodes: dict[str, Site] = poutine.trace(program.model).get_trace(asked).nodes
        return {
            name: nodes[name]["value"]
            for name in (*(s.name for s in program.latents.sites), *program.derived)
        }

    try:
        parts = [
            v
            for _, v in each_client(
                federation, message, table, draw, draws=draws, seed=seed, apart="prior"
            )
        ]
    except NoKeyedDraw:  # a Gamma, say: drawn by torch itself, one client and one draw at a time
        one_by_one = replace(federation, program=replace(program, keyed=False))
        parts = [
            v
            for _, v in each_client(
                one_by_one, message, table, draw, draws=draws, seed=seed, apart="prior"
            )
        ]
    return together(program, parts)


def plates_of(program: Program) -> dict[str, int]:
    """A client's own sites, latent and deterministic: name -> plates left of the clients."""
    local = {
        site.name: len(site.batch_shape) - 2 for site in program.latents.sites if site.is_local
    }
    return local | {name: inner for name, inner in program.derived.items() if inner is not None}


def together(program: Program, parts: Sequence[Values]) -> Draws:
    """Draws of chunks of clients, (C, S, ...) each, as those of all."""
    local = plates_of(program)
    own = {}
    for name in local:
        if name in parts[0]:
            at = 2 + local[name]
            value = torch.cat([part[name] for part in parts])  # (N, S, *plates, 1, 1, *event)
            own[name] = value.squeeze(at).squeeze(at).movedim(0, 1)
    return Draws({name: value[0] for name, value in parts[0].items() if name not in local}, own)


def predict(
    federation: Federation,
    message: Tree,
    table: Table,
    rows: ClientData,
    *,
    site: str,
    draws: int,
    seed: int,
) -> Prediction:
    """The posterior predictive of rows of the federation's clients, client i of `rows` being client i of the federation."""
    program = federation.program
    known = program.labels[site] in rows.fields
    kinds: set[str] = set()

    def score(params: Params, own: ClientBatch, asked: ClientBatch) -> Tree:
        fn, value = program.observed(program.draw(params, own), asked, params)[site]
        kinds.add(kind_of(fn))
        return moments(fn, value if known else None)

    parts = []
    for ids, values in each_client(
        federation, message, table, score, draws=draws, seed=seed, rows=rows
    ):
        counts = rows.counts[ids]
        inside = torch.arange(int(counts.max()))[None] < counts[:, None]
        parts.append({name: averaged(name, value)[inside] for name, value in values.items()})
    return gathered(rows, site, parts, kinds.pop())


def predict_at(
    federation: Federation,
    message: Tree,
    table: Table,
    draws: Draws,
    rows: ClientData,
    *,
    site: str,
) -> Prediction:
    """`predict` at draws of every latent site that are given: the guide is not asked again."""
    program = federation.program
    known = program.labels[site] in rows.fields
    kinds: set[str] = set()

    def score(params: Params, values: Values, asked: ClientBatch) -> Tree:
        fn, value = program.observed(values, asked, params)[site]
        kinds.add(kind_of(fn))
        return moments(fn, value if known else None)

    found = at_draws(federation, message, table, draws, score, rows=rows)
    parts = [
        {name: averaged(name, value)[batch.mask()] for name, value in values.items()}
        for batch, values in found
    ]
    return gathered(rows, site, parts, kinds.pop())


def each_client(
    federation: Federation,
    message: Tree,
    table: Table,
    one: Callable[[Params, ClientBatch, ClientBatch], Tree],
    *,
    draws: int,
    seed: int,
    rows: ClientData | None = None,
    width: int = 1,
    apart: str = "posterior",
) -> Iterator[tuple[Tensor, Tree]]:
    """`one(params, own rows, rows asked of)` for every draw of every client: chunks of (ids (C,), trees (C, S, ...)).

    Args:
        federation: whose clients.
        message: the server's last.
        table: what the clients keep.
        one: of one client and one draw; draw d of a seed is the same whatever is asked of it.
        draws: S.
        seed: of the draws.
        rows: asked of; None: each client's own.
        width: how much wider than one draw's work that of `one` is: so many fewer are carried at once.
        apart: a word that makes draws for one purpose other than those for another.
    """
    data, program, client = federation.data, federation.program, federation.client
    at = (noise.word(apart),)
    at_once = federation.at_once
    for ids in torch.arange(data.num_clients).split(min(federation.slots, SLOTS)):
        batch = full_batch(data, ids, seed=seed, at=at)
        asked = labelled(
            batch if rows is None else full_batch(rows, ids, seed=seed, at=at), program
        )
        own_rows, shared = slots_of(batch)

        def of_client(
            own: Tree,
            row: Tree,
            query: Tree,
            batch: ClientBatch = batch,
            asked: ClientBatch = asked,
            shared: Tree = shared,
        ) -> Tree:
            params = client.params(message, own)
            mine, theirs = one_slot(row, shared, batch), one_slot(query, shared, asked)
            index = torch.arange(draws, dtype=torch.int32)
            size = max(
                1,
                (AT_ONCE if width == 1 else ROWS_AT_ONCE // (width * asked.num_rows))
                // len(batch.counts),
            )
            if not program.keyed:
                return tree_map(
                    lambda *v: torch.stack(v),
                    *[one(params, mine.redrawn(d), theirs.redrawn(d)) for d in index],
                )
            return torch.vmap(
                lambda d: one(params, mine.redrawn(d), theirs.redrawn(d)), chunk_size=size
            )(index)

        mine = taken(table, ids)
        with pyro.validation_enabled(False), torch.no_grad():
            yield (
                ids,
                over_clients(of_client, at_once)(
                    mine, own_rows, slots_of(asked)[0], count=len(ids)
                ),
            )


def at_draws(
    federation: Federation,
    message: Tree,
    table: Table,
    draws: Draws,
    one: Callable[[Params, Values, ClientBatch], Tree],
    *,
    rows: ClientData | None = None,
) -> Iterator[tuple[ClientBatch, Tree]]:
    """`one(params, latent sites, rows asked of)` at draws that are given: chunks of (batch of C clients, trees (C, S, ...)).

    Args:
        federation: whose clients.
        message: the server's last.
        table: what the clients keep.
        draws: of every latent site of every client.
        one: of one client and one draw.
        rows: asked of; None: each client's own.
    """
    data, program, client = federation.data, federation.program, federation.client
    shared, own = latent(program, draws)
    at_once = federation.at_once
    for ids in torch.arange(data.num_clients).split(min(federation.slots, SLOTS)):
        asked = labelled(full_batch(data if rows is None else rows, ids), program)
        lanes, common = slots_of(asked)
        size = max(1, AT_ONCE // len(ids))

        def of_client(
            mine: Tree,
            lane: Tree,
            values: Values,
            asked: ClientBatch = asked,
            common: Tree = common,
            size: int = size,
        ) -> Tree:
            params, batch = client.params(message, mine), one_slot(lane, common, asked)
            return torch.vmap(lambda v: one(params, v, batch), chunk_size=size)(
                {**values, **shared}
            )

        with pyro.validation_enabled(False), torch.no_grad():
            values = {name: value[ids] for name, value in own.items()}
            yield (
                asked,
                over_clients(of_client, at_once)(taken(table, ids), lanes, values, count=len(ids)),
            )


def latent(program: Program, draws: Draws) -> tuple[Values, Values]:
    """Draws of the latent sites in a program's own shapes: global (S, *shape); local (N, S, *plates, 1, 1, *event)."""
    plates, sites = plates_of(program), program.latents.sites
    own = {s.name: draws.own[s.name].movedim(1, 0) for s in sites if s.is_local}
    for name, value in own.items():
        own[name] = value.unsqueeze(2 + plates[name]).unsqueeze(2 + plates[name])
    return {s.name: draws.shared[s.name] for s in sites if not s.is_local}, own


def labelled(batch: ClientBatch, program: Program) -> ClientBatch:
    """A batch whose missing labels are zeros, so that a model can be asked for the distribution of what it observes."""
    like = {name: program.prototype.fields.get(name) for name in program.labels.values()}
    missing = {
        k: v.new_zeros(batch.num_clients, batch.num_rows, *v.shape[2:])
        for k, v in like.items()
        if v is not None
    }
    return replace(batch, fields={**missing, **batch.fields})
