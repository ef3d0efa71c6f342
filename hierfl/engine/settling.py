"""What predictions need of the clients' own rows, found after the rounds (`Client.settle`)."""

from __future__ import annotations

import warnings
from functools import partial

import torch

from hierfl.core.device import CPU, moved, on
from hierfl.core.trees import Tree, tree_leaves
from hierfl.data.batch import full_batch
from hierfl.data.ragged import cut_ragged
from hierfl.engine.client_store import Table, put, taken
from hierfl.engine.federation import Federation
from hierfl.engine.over_clients import over_batch
from hierfl.program.handlers import unchecked

CLIENTS_AT_ONCE = 64
ROWS_AT_ONCE = 1 << 12  # of clients carried at once, padded ones included
NAMED = 5  # clients in a message


def settle(federation: Federation, last: Tree, table: Table) -> None:
    """Let every client find what predictions need of its rows, and put it into the table."""
    one = federation.client.settle
    if one is None:
        return
    data, without = federation.data, []
    most = max(1, min(CLIENTS_AT_ONCE, ROWS_AT_ONCE // max(1, int(data.counts.max()))))
    for ids in cut_ragged(torch.arange(data.num_clients).split(most), data.counts, most=most):
        with on(federation.device), unchecked(), torch.no_grad():
            message, own = moved((last, taken(table, ids)), federation.device)
            batch = full_batch(federation.rows, ids.to(federation.device), seed=federation.seed)
            found = over_batch(partial(one, message), federation.at_once)(own, batch)
            found = moved(found, CPU)
        put(table, ids, found)
        nan = [
            v.isnan().reshape(len(ids), -1).any(1)
            for v in tree_leaves(found)
            if v.is_floating_point()
        ]
        bad = torch.stack(nan).any(0) if nan else torch.zeros(len(ids), dtype=torch.bool)
        without += [data.names[int(i)] for i in ids[bad]]
    if without:
        some = ", ".join(f"'{name}'" for name in without[:NAMED])
        warnings.warn(
            f"too few rows at {some}{', ...' if len(without) > NAMED else ''} for what predictions "
            f"need, so that theirs are NaN (clients: {len(without)}): leave such clients out, "
            "Settings(min_rows=2)",
            stacklevel=3,
        )
