"""Clients without any data: their local sites are drawn from the prior, given draws of the global ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyro
import torch
from pyro import poutine
from torch import Tensor

from hierfl.core import noise
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import ClientBatch, full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import taken
from hierfl.engine.over_clients import one_slot, over_clients, slots_of
from hierfl.posterior.draws import AT_ONCE, SLOTS, labelled, posterior_draws
from hierfl.posterior.prediction import Prediction, averaged, gathered, kind_of, moments
from hierfl.program.handlers import Answer
from hierfl.program.keyed_draws import NoKeyedDraw
from hierfl.program.program import Params
from hierfl.program.sites import Values

if TYPE_CHECKING:
    from hierfl.runs.result import Fit


def predict_from_prior(
    fit: Fit, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0
) -> Prediction:
    """What a fit says of clients of which it has seen nothing, no label and no row.

        p(y | x) = E_{z ~ q(z)} E_{w ~ p(w | z)} p(y | x, w, z),    z the global sites, w those of the new client

    The average is over `draws` pairs (z, w). Under a point estimate of z (MAP) only w varies. Once a client has labels, its own
    posterior says more: `fit.personalise`.

    Args:
        fit: of other clients.
        rows: of the new clients, labelled (then they are scored) or not. A name may be that of a client that was fitted: what is
            known of it is not used.
        site: the observed site to predict; None: the model's, if it has one alone.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: a field is missing, or holds NaN; or the model observes several sites, and none is chosen.
        KeyError: the model observes no such site.
    """
    fit.check_rows(rows, fit.program.reads.model)
    program = fit.program
    site = program.observed_site(site)
    known = program.labels[site] in rows.fields
    kinds: set[str] = set()

    def score(params: Params, shared: Values, asked: ClientBatch) -> Tree:
        fn, value = program.observed(shared, asked, params)[site]
        kinds.add(kind_of(fn))
        return moments(fn, value if known else None)

    found = _each_newcomer(fit, rows, score, draws=draws, seed=seed)
    parts = [
        {name: averaged(name, value)[batch.mask()] for name, value in values.items()}
        for batch, values in found
    ]
    return gathered(rows, site, parts, kinds.pop())


def expected_of_clients(fit: Fit, *, draws: int = 200, seed: int = 0) -> Values:
    """What the global level alone expects of each client that was fitted: draws of its own sites, (S, N, *shape).

    From p(w_k | z), z drawn from the posterior of the global sites; client k's rows are heard only by way of z. Beside `fit.draws`,
    they show what its rows have said.

    Args:
        fit: its own clients are asked of, with their fields (a county's uranium).
        draws: S.
        seed: of the draws.
    """
    program = fit.program
    inner = {
        site.name: len(site.batch_shape) - 2 for site in program.latents.sites if site.is_local
    }
    inner |= {name: plates for name, plates in program.derived.items() if plates is not None}

    def own_sites(params: Params, shared: Values, asked: ClientBatch) -> Tree:
        with Answer(params, asked):
            nodes = (
                poutine.trace(poutine.condition(program.model, data=shared)).get_trace(asked).nodes
            )
        return {name: nodes[name]["value"] for name in inner}

    parts = [
        values
        for _, values in _each_newcomer(fit, fit.federation.data, own_sites, draws=draws, seed=seed)
    ]
    own = {}
    for name, plates in inner.items():
        value = torch.cat([part[name] for part in parts])  # (N, S, *plates, 1, 1, *event)
        own[name] = value.squeeze(2 + plates).squeeze(2 + plates).movedim(0, 1)
    return own


Score = Callable[[Params, Values, ClientBatch], Tree]


def _each_newcomer(
    fit: Fit, rows: ClientData, score: Score, *, draws: int, seed: int
) -> Iterator[tuple[ClientBatch, Tree]]:
    """`score(params, global draw, rows asked of)` for every draw and client: chunks of (batch of C, trees (C, S, ...))."""
    shared, message, client = _global_draws(fit, draws, seed), fit.message, fit.federation.client
    index = torch.arange(draws, dtype=torch.int32)
    for ids in torch.arange(rows.num_clients).split(min(fit.federation.slots, SLOTS)):
        batch = labelled(
            full_batch(rows, ids, seed=seed, at=(noise.word("newcomer"),)), fit.program
        )
        own, common = slots_of(batch)

        def of_client(
            lane: Tree, keyed: bool, batch: ClientBatch = batch, common: Tree = common
        ) -> Tree:
            one, params = one_slot(lane, common, batch), client.params(message, client.own)

            def of_draw(d: Tensor, of_d: Values) -> Tree:
                return score(params, of_d, one.redrawn(d))

            if keyed:
                return torch.vmap(of_draw, chunk_size=max(1, AT_ONCE // len(batch.counts)))(
                    index, shared
                )
            each = [
                of_draw(index[d], {name: value[d] for name, value in shared.items()})
                for d in range(draws)
            ]
            return tree_map(lambda *v: torch.stack(v), *each)

        with pyro.validation_enabled(False), torch.no_grad():
            try:
                values = over_clients(partial(of_client, keyed=True), fit.federation.at_once)(
                    own, count=len(ids)
                )
            except (
                NoKeyedDraw
            ):  # a Gamma, say: drawn by torch itself, one client and one draw at a time
                values = over_clients(partial(of_client, keyed=False), False)(own, count=len(ids))
        yield batch, values


def _global_draws(fit: Fit, draws: int, seed: int) -> Values:
    """Draws of the global sites, (S, *shape): they are the same whichever client is asked, so one is."""
    first = replace(fit.federation, data=fit.federation.data.select([0]))
    table = taken(fit.progress.table, torch.tensor([0]))
    return posterior_draws(first, fit.message, table, draws=draws, seed=seed).shared
