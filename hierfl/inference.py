"""From a finished run to draws: of every client's sites, and of what they say of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyro
import torch
from torch import Tensor

from hierfl import noise
from hierfl.batch import ClientBatch, full_batch, lanes_of, one_lane
from hierfl.data import ClientData
from hierfl.engine import Federation, over_clients
from hierfl.prediction import Prediction, averaged, gathered, kind_of, moments
from hierfl.program import Params, Program
from hierfl.sites import Values
from hierfl.table import Table, taken
from hierfl.trees import Tree, tree_map

LANES, AT_ONCE = 64, 512  # clients, and clients x draws, carried at once


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of the posterior: `shared` site -> (S, *shape); `own` site -> (S, N, *shape of one client's)."""

    shared: Values
    own: Values


def posterior_draws(federation: Federation, message: Tree, table: Table, *, draws: int, seed: int) -> Draws:
    """Draw every latent site; each client draws its own, given the draws of the global sites that all share."""
    program = federation.program
    local = {site.name: len(site.batch_shape) - 2 for site in program.latents.sites if site.is_local}
    local |= {name: inner for name, inner in program.derived.items() if inner is not None}

    def draw(params: Params, batch: ClientBatch, asked: ClientBatch) -> Values:
        values = program.draw(params, batch)
        return {**values, **program.derive(values, params, asked)}

    parts = [values for _, values in _each_client(federation, message, table, draw, draws=draws, seed=seed)]
    shared = {name: value[0] for name, value in parts[0].items() if name not in local}
    own = {}
    for name, inner in local.items():
        value = torch.cat([part[name] for part in parts])  # (N, S, *inner, 1, 1, *event)
        own[name] = value.squeeze(2 + inner).squeeze(2 + inner).movedim(0, 1)
    return Draws(shared, own)


def predict(
    federation: Federation, message: Tree, table: Table, rows: ClientData, *, site: str, draws: int, seed: int
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
    for ids, values in _each_client(federation, message, table, score, draws=draws, seed=seed, rows=rows):
        counts = rows.counts[ids]
        inside = torch.arange(int(counts.max()))[None] < counts[:, None]
        parts.append({name: averaged(name, value)[inside] for name, value in values.items()})
    return gathered(rows, site, parts, kinds.pop())


def _each_client(
    federation: Federation,
    message: Tree,
    table: Table,
    one: Callable[[Params, ClientBatch, ClientBatch], Tree],
    *,
    draws: int,
    seed: int,
    rows: ClientData | None = None,
) -> Iterator[tuple[Tensor, Tree]]:
    """`one(params, own rows, rows asked of)` for every draw of every client: chunks of (ids (C,), trees (C, S, ...))."""
    data, program, client = federation.data, federation.program, federation.client
    at = (noise.word("posterior"),)
    at_once = federation.at_once
    for ids in torch.arange(data.num_clients).split(min(federation.lanes, LANES)):
        batch = full_batch(data, ids, seed=seed, at=at)
        asked = labelled(batch if rows is None else full_batch(rows, ids, seed=seed, at=at), program)
        own_rows, shared = lanes_of(batch)

        def of_client(
            own: Tree, row: Tree, query: Tree, batch: ClientBatch = batch, asked: ClientBatch = asked, shared: Tree = shared
        ) -> Tree:
            params = client.params(message, own)
            mine, theirs = one_lane(row, shared, batch), one_lane(query, shared, asked)
            index = torch.arange(draws, dtype=torch.int32)
            if not program.keyed:
                return tree_map(lambda *v: torch.stack(v), *[one(params, mine.redrawn(d), theirs) for d in index])
            return torch.vmap(lambda d: one(params, mine.redrawn(d), theirs), chunk_size=max(1, AT_ONCE // len(batch.counts)))(
                index
            )

        mine = taken(table, ids)
        with pyro.validation_enabled(False), torch.no_grad():
            yield ids, over_clients(of_client, at_once)(mine, own_rows, lanes_of(asked)[0], count=len(ids))


def labelled(batch: ClientBatch, program: Program) -> ClientBatch:
    """A batch whose missing labels are zeros, so that a model can be asked for the distribution of what it observes."""
    like = {name: program.prototype.fields.get(name) for name in program.labels.values()}
    missing = {k: v.new_zeros(batch.num_clients, batch.num_rows, *v.shape[2:]) for k, v in like.items() if v is not None}
    return replace(batch, fields={**missing, **batch.fields})
