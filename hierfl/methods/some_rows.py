"""A batch of one client without some of its rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch


def some_rows(batch: ClientBatch, keep: Tensor) -> tuple[ClientBatch, Tensor]:
    """Return a client's batch with some rows, `keep` (1, B), scaled up; and 1 or 0, if any is kept.

    Without any the batch is as it was, so that its loss is finite: multiply the loss by the second.
    """
    there = torch.ones_like(keep) if batch.rows is None else batch.rows
    kept = keep & there
    any_left = kept.any()
    rows = torch.where(any_left, kept, there)
    return replace(batch, rows=rows, is_mini_batch=True), any_left.to(batch.counts.dtype)
