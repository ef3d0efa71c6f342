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
        """Return which row of its client lies at a place in the half, (K, C, B) int64 both."""
        epoch = torch.zeros(place.shape[:2], dtype=torch.int64, device=place.device)
        return self.orders.at(epoch, place + self.first[:, None])


def half_of(
    data: ClientData, ids: Tensor, rows: Literal["support", "query"], *, seed: int, round_: int
) -> Half:
    """Return the support or the query of clients `ids` (C,) in a round; both are all rows.

    Which rows they hold depends on the client's name, the seed and the round alone. Of an odd
    number the support has one row more; a single row is in both.
    """
    counts = data.counts[ids]
    support = (counts + 1) // 2
    keys = noise.fold_now(data.keys[ids], seed, seed >> 32, noise.word("halves"), round_)
    orders = Orders.of(keys, counts)
    if rows == "support":
        return Half(support, torch.zeros_like(counts), orders)
    query = (counts - support).clamp(min=1)
    return Half(query, counts - query, orders)
