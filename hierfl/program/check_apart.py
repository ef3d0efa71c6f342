"""The check that clients in one batch do not depend on each other, as the pooled program and NUTS need.

The other engines give a program one client at a time. There `batch.x.mean()` is the mean of one client; in a
batch of all clients it would be the mean of all, and padded rows would count in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pyro import poutine

from hierfl.data.batch import ClientBatch, gather, keys_of
from hierfl.data.clients import ClientData
from hierfl.program.check_padding import PADDED
from hierfl.program.few_rows import first_difference, point, unlike
from hierfl.program.handlers import Answer
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Values
from hierfl.program.stacking import stacked
from hierfl.program.traces import in_clients, per_client, samples, scored


def check_apart(program: Program, data: ClientData) -> None:
    """Refuse a program in which a client's log density depends on the clients it is in a batch with.

    Args:
        program: to check.
        data: the clients it will run on together.

    Raises:
        ProgramError: a local site differs between a client alone and beside another; the message names it.
    """
    if data.num_clients == 1:
        return
    few = unlike(data, tuple(program.labels.values()))
    rows = max(PADDED, len(few))
    index = torch.stack([few[torch.arange(rows) % len(few)], few.flip(0)[:1].expand(rows)])
    ids = torch.tensor([0, data.num_clients - 1])
    pair = gather(data, ids, index, None, keys_of(data, ids, 0, 0))
    pair = replace(pair, counts=torch.full_like(pair.counts, rows))

    def evaluate(away: float, batch: ClientBatch) -> Values:
        params, values = _of_clients(program, away, batch.num_clients)
        with Answer(params, batch):
            trace = poutine.trace(poutine.condition(program.model, data=values)).get_trace(batch)
        return {
            name: per_client(scored(site, site["fn"].log_prob(site["value"])))[:1]
            for name, site in samples(trace)
            if in_clients(site)
        }

    found = first_difference(evaluate, _first(pair), pair)
    if found:
        raise ProgramError(
            f"site '{found}' depends on which clients are in the batch, and here all of them are: reduce "
            f"over the rows of each client, by batch.mean and batch.sum, not over clients"
        )


def _first(pair: ClientBatch) -> ClientBatch:
    """Return the batch of the first client alone."""
    return replace(
        pair,
        fields={name: v[:1] for name, v in pair.fields.items()},
        client_fields={name: v[:1] for name, v in pair.client_fields.items()},
        counts=pair.counts[:1],
        own_keys=pair.own_keys[:1],
    )


def _of_clients(program: Program, away: float, count: int) -> tuple[Params, Values]:
    """Return params and latent sites of some clients; those of the first are the same whatever the count."""
    each = [point(program, away, seed=seed) for seed in range(count)]
    params, values = each[0]
    local = [spec.name for spec in program.params if spec.is_local]
    own = {name: torch.stack([p[name] for p, _ in each]) for name in local}
    sites = {s.name: len(s.batch_shape) - 2 for s in program.latents.local_block.sites}
    return (
        {**params, **stacked(program, own)},
        {**values, **{n: torch.cat([v[n] for _, v in each], axis) for n, axis in sites.items()}},
    )
