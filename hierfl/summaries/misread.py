"""Are a client's rows what was read of the program on a few? Its log likelihoods at random points."""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.summaries.packed_rows import AWAY, NATS, RELATIVE, TRIES, PackedRows
from hierfl.summaries.reading import Reading


def points_to_test(reading: Reading) -> tuple[Tensor, Tensor]:
    """Return random points (T, K) and (T, D) of global and local sites, for all clients."""
    g, size = torch.Generator().manual_seed(0), len(reading.origin)
    z = reading.origin.double() + AWAY * torch.randn(TRIES, size, generator=g)
    return z, AWAY * torch.randn(TRIES, reading.own_size, generator=g)


def misread(rows: PackedRows, batch: ClientBatch, points: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for a client whose rows have another log likelihood than was read, else 0, (C,)."""
    reading = rows.line.reading
    whole = Reading(reading.program, torch.arange(len(reading.origin)), reading.origin)
    flags = []
    for z, w in zip(*points, strict=True):
        expected = whole.log_likelihoods(torch.cat([w, z]), batch)
        own = w
        if reading.effects is not None:
            shift, scale = reading.effects.at(z)
            own = shift + scale @ w
        read = rows.values(torch.cat([own, z[reading.shared]]).expand(rows.clients, 1, -1))[:, 0]
        differs = (read - expected).abs() > NATS + RELATIVE * expected.abs()
        flags.append(differs | (expected.isfinite() & ~read.isfinite()))
    return torch.stack(flags).any(0).to(expected.dtype)
