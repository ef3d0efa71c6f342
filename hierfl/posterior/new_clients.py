"""Clients without training rows: their local sites are drawn from the prior."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro import poutine

from hierfl.core.arguments import spelled
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.posterior.client_loop import Chunk, each_draw
from hierfl.posterior.draws import joined_local, local_plates, mapped_or_in_turn, posterior_draws
from hierfl.posterior.prediction import Prediction, in_frame_order, predicted
from hierfl.posterior.snapshot import (
    Snapshot,
    check_rows,
    expect_fit,
    first_client,
    global_sites,
    lacks_rows,
)
from hierfl.program.check_dependence import check_labels_given
from hierfl.program.handlers import Substitute, sites_until
from hierfl.program.program import Params
from hierfl.program.sites import Values

OfNewClient = Callable[[Params, Values, ClientBatch], Tree]


@spelled
@one_at_a_time
def predict_from_prior(
    fit: Snapshot, rows: ClientData, *, site: str | None = None, draws: int = 200, seed: int = 0
) -> Prediction:
    """Predict the rows of clients that the fit has not seen, without their labels or other rows.

        p(y | x) = E_{z ~ q(z)} E_{w ~ p(w | z)} p(y | x, w, z),    z global, w the new client's sites

    The average is over `draws` pairs (z, w). Under a point estimate of z (MAP) only w varies. Once
    a client has labels, its own posterior says more: `fit.personalize`.

    Args:
        fit: a fit of other clients.
        rows: rows of the new clients; if they have labels, these are scored. A name may be that of
            a fitted client: nothing known about that client is used.
        site: the observed site to predict; None: the model's only one.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: a field is missing or holds NaN; the model observes several sites and `site` is
            None; or the method predicts by statistics of a client's own rows (`batch_normed`).
        KeyError: the model observes no such site.
    """
    expect_fit(fit)
    given, rows = rows, fit._rows(rows)
    if fit.federation.client.settle is not None:
        raise ValueError(
            f"'{fit.method.name}' predicts a client's rows from statistics of its own rows: "
            "give it some, fit.personalize(rows, rounds=0).predict(rows)"
        )
    check_rows(fit, rows, fit.program.reads.model)
    check_labels_given(fit.program, rows)
    site = fit.program.observed_site(site)

    shared = _global_draws(fit, draws, seed)

    def run(of_new_client: OfNewClient, first: int, count: int) -> Iterator[Chunk]:
        return _each_new_client(
            fit, rows, of_new_client, shared, draws=count, seed=seed, first=first
        )

    prediction = predicted(fit.program, rows, site, run, draws)
    return prediction if rows is given else in_frame_order(prediction)


@one_at_a_time
def expected_of_clients(fit: Snapshot, *, draws: int = 200, seed: int = 0) -> Values:
    """Draw p(w_k | z) for every client, z from the posterior: site -> (S, N, *shape)."""
    program = fit.program
    local = local_plates(program)

    def own_sites(params: Params, shared: Values, batch: ClientBatch) -> Tree:
        with Substitute(params, batch, reparameterized=False):
            model = poutine.condition(program.model, data=shared)
            nodes = sites_until(lambda: model(batch), local)
        return {name: nodes[name]["value"] for name in local}

    above = _global_draws(fit, draws, seed)
    chunks = _each_new_client(fit, fit.federation.data, own_sites, above, draws=draws, seed=seed)
    return joined_local(program, [chunk.found for chunk in chunks])


def _each_new_client(
    fit: Snapshot,
    rows: ClientData,
    of_new_client: OfNewClient,
    shared: Values,
    *,
    draws: int,
    seed: int,
    first: int = 0,
) -> Iterator[Chunk]:
    """Evaluate `of_new_client(params, global draw, rows)` for all: chunks of trees (C, S, ...)."""

    def at_draw(params: Params, own: ClientBatch, batch: ClientBatch) -> Tree:
        d = torch.as_tensor(batch.words[-1]).long()[None]
        return of_new_client(
            params, {name: v.index_select(0, d)[0] for name, v in shared.items()}, batch
        )

    def run(snapshot: Snapshot) -> Iterator[Chunk]:
        which: dict[str, Any] = {"draws": draws, "seed": seed, "first": first}
        return each_draw(snapshot, at_draw, rows=rows, new=True, salt="newcomer", **which)

    return mapped_or_in_turn(fit, run)


def _global_draws(fit: Snapshot, draws: int, seed: int) -> Values:
    """Draw the global sites, (S, *shape), by one client: they do not depend on it."""
    first = first_client(fit)
    if not lacks_rows(fit):
        return posterior_draws(first, draws=draws, seed=seed).shared
    names = global_sites(fit.program)
    return posterior_draws(first, draws=draws, seed=seed, keep=names).shared if names else {}
