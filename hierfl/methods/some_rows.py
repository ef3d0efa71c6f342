"""A batch of one client without some of its rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch


def some_rows(batch: ClientBatch, keep: Tensor) -> tuple[ClientBatch, Tensor]:
    """Return a batch with only some of its rows, scaled up to all rows of the client.

    Args:
        batch: of one client.
        keep: (1, B) bool.

    Returns:
        The batch, and 1 or 0: whether any row is kept. Where none is, the batch is as it was, so
            that its loss is
        finite: multiply the loss by the second.
    """
    there = torch.ones_like(keep) if batch.rows is None else batch.rows
    kept = keep & there
    any_left = kept.any()
    rows = torch.where(any_left, kept, there)
    return replace(batch, rows=rows, is_mini_batch=True), any_left.to(batch.counts.dtype)
