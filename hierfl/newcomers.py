"""Clients without any data: their local sites are drawn from the prior, given draws of the global ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl import noise
from hierfl.batch import ClientBatch, full_batch, lanes_of, one_lane
from hierfl.data import ClientData
from hierfl.draws import NoKeyedDraw
from hierfl.engine import over_clients
from hierfl.inference import AT_ONCE, LANES, _asked, _averaged, posterior_draws
from hierfl.prediction import Prediction, kind_of, moments
from hierfl.program import Answer, Params, Program, ProgramError
from hierfl.sites import Values
from hierfl.trees import Tree, tree_map

if TYPE_CHECKING:
    from hierfl.fitted import Fit


def predict_from_prior(fit: Fit, rows: ClientData, *, draws: int = 200, seed: int = 0) -> Prediction:
    """What a fit says of clients of which it has seen nothing, no label and no row.

        p(y | x) = E_{z ~ q(z)} E_{w ~ p(w | z)} p(y | x, w, z),    z the global sites, w those of the new client

    The average is over `draws` pairs (z, w). Under a point estimate of z (MAP) only w varies. Once a client has labels, its own
    posterior says more: `fit.personalise`.

    Args:
        fit: of other clients.
        rows: of the new clients, labelled (then they are scored) or not. A name may be that of a client that was fitted: what is
            known of it is not used.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: a field is missing, or holds NaN.
        ProgramError: the prior of a local site cannot be drawn from by keys (a Gamma, say).
    """
    fit._check_rows(rows)
    program, client, message = fit.program, fit.federation.client, fit.message
    site, label = next(iter(program.labels.items()))
    shared = _global_draws(fit, draws, seed)
    kinds: set[str] = set()
    parts = []
    for ids in torch.arange(rows.num_clients).split(min(fit.federation.lanes, LANES)):
        batch = _asked(full_batch(rows, ids, seed=seed, at=(noise.word("newcomer"),)), program.labels.values())
        lanes, common = lanes_of(batch)

        def of_client(lane: Tree, batch: ClientBatch = batch, common: Tree = common) -> Tree:
            one, params = one_lane(lane, common, batch), client.params(message, client.own)

            def score(index: Tensor, values: Values) -> Tree:
                fn = _given_prior(program, values, one.redrawn(index), params)[site]
                kinds.add(kind_of(fn))
                return moments(fn, getattr(one, label))

            at_once = torch.vmap(score, chunk_size=max(1, AT_ONCE // len(batch.counts)))
            scores: Tree = at_once(torch.arange(draws, dtype=torch.int32), shared)
            return scores

        with pyro.validation_enabled(False), torch.no_grad():
            values = over_clients(of_client, fit.federation.lanes > 1)(lanes, count=len(ids))
        parts.append({name: _averaged(name, value)[batch.mask()] for name, value in values.items()})
    flat = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sd = (flat["square"] - flat["mean"] ** 2).clamp(min=0.0).sqrt() if "square" in flat else None
    return Prediction(rows, label, flat["mean"], sd, flat.get("log_prob"), kinds.pop())


def _global_draws(fit: Fit, draws: int, seed: int) -> Values:
    """Draws of the global sites, (S, *shape): they are the same whichever client is asked, so one is."""
    first = replace(fit.federation, data=fit.federation.data.select([0]))
    table = tree_map(lambda v: v[:1], fit.progress.table)
    return posterior_draws(first, fit.message, table, draws=draws, seed=seed).shared


def _given_prior(program: Program, shared: Values, batch: ClientBatch, params: Params) -> dict[str, Any]:
    """The distribution of each observed site, local sites drawn from their prior given the global ones, by the batch's keys."""
    try:
        with Answer(params, batch), _Undrawn(program.labels):
            trace = poutine.trace(poutine.condition(program.model, data=shared)).get_trace(batch)
    except NoKeyedDraw as error:
        raise ProgramError(
            f"the prior of a local site is a {error}, which has no draw by key: a client without data can be predicted for if it "
            f"is a transform of normals or uniforms (a LogNormal, say); one with data by fit.personalise"
        ) from error
    return {name: trace.nodes[name]["fn"] for name in program.labels}


class _Undrawn(Messenger):  # type: ignore[misc]
    """Leaves sites undrawn whose labels are unknown: their distribution is what is asked for."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["name"] in self.names and not msg["done"] and not msg["is_observed"]:
            msg["value"], msg["done"] = torch.zeros(msg["fn"].shape()), True
