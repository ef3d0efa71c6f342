"""Clients of very different numbers of rows: how padding is kept from filling memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hierfl.data.clients import ClientData

FEW_ROWS = 1 << 16  # of a chunk of clients, padded ones included: too few to be worth cutting
MUCH_PADDING = 1 << 21  # padded rows of a chunk that predictions at 200 draws would take 16 GB for
ONE_BATCH = 1 << 34  # bytes of all clients in one batch


def cut_ragged(
    chunks: Sequence[Tensor],
    *counts: Tensor,
    most: int,
    few: int = FEW_ROWS,
    padding: int = MUCH_PADDING,
) -> tuple[Tensor, ...]:
    """Cut chunks that hold more than `padding` padded rows, unless they have at most `few` rows in all."""
    padded = 0
    for chunk in chunks:
        for rows in counts:
            padded = max(padded, len(chunk) * int(rows[chunk].max()) - int(rows[chunk].sum()))
    if padded <= padding:
        return tuple(chunks)
    ids = torch.cat(tuple(chunks))
    lengths = _lengths(torch.stack([rows[ids] for rows in counts]).amax(0).tolist(), most, few)
    return ids.split(lengths)


def _lengths(rows: list[int], most: int, few: int) -> list[int]:
    """Return the lengths of runs of clients that, padded, have `few` rows or a fifth of padding."""
    lengths, largest, there = [0], 0, 0
    for own in rows:
        wide = (lengths[-1] + 1) * max(largest, own)
        if lengths[-1] == most or (lengths[-1] and wide > max(few, 5 * (there + own) // 4)):
            lengths.append(0)
            largest, there = 0, 0
        lengths[-1], largest, there = lengths[-1] + 1, max(largest, own), there + own
    return lengths


def check_padded(data: ClientData) -> None:
    """Refuse one batch of all clients that is over 16 GB and ten times the rows themselves."""
    longest, rows = int(data.counts.max()), data.num_rows
    row_bytes = sum(v[:1].nbytes for v in data.fields.values())
    wide = longest * data.num_clients
    if wide > 10 * rows and wide * row_bytes > ONE_BATCH:
        what = f"one batch of {data.num_clients} clients is padded to the longest, {longest} rows"
        size = f"{wide * row_bytes / 2**30:.0f} GB for {rows} rows"
        fix = "use hierfl.fit, or leave the longest clients out"
        raise ValueError(f"{what}: {size}; {fix}")
