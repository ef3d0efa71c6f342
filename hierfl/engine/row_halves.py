"""The two halves of each client's rows, support and query, drawn anew in each round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.data.clients import ClientData
from hierfl.engine.row_orders import Orders


@dataclass(frozen=True, eq=False)
class Half:
    """One half of the rows of C clients.

    Args:
        counts: (C,) int64, the numbers of rows in it.
        first: (C,) int64, where it begins in the order of the client's rows.
        orders: of each client's rows in this round.
    """

    counts: Tensor
    first: Tensor
    orders: Orders

    def within(self, place: Tensor) -> Tensor:
        """Return which row of its client lies at a place in the half.

        Args:
            place: (K, C, B) int64, below the half's number of rows.

        Returns:
            (K, C, B) int64.
        """
        epoch = torch.zeros(place.shape[:2], dtype=torch.int64, device=place.device)
        return self.orders.at(epoch, place + self.first[:, None])


def half_of(
    data: ClientData, ids: Tensor, rows: Literal["support", "query"], *, seed: int, round_: int
) -> Half:
    """Return the support or the query of some clients in a round; together they are all of a client's rows.

    Which rows a client has in them depends on its name, the seed and the round alone. Of an odd
    number the support has one row more; a single row is in both.

    Args:
        data: the federation.
        ids: (C,) int64, the clients.
        rows: which half.
        seed: of the run.
        round_: number of the round.
    """
    counts = data.counts[ids]
    support = (counts + 1) // 2
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("halves"), round_)
    orders = Orders.of(keys, counts)
    if rows == "support":
        return Half(support, torch.zeros_like(counts), orders)
    query = (counts - support).clamp(min=1)
    return Half(query, counts - query, orders)
