"""Whether a client's likelihood is what was read off a few rows of a program.

Which numbers a likelihood reads, which of them shift its linear predictors, and what a non-centered
program's effects
are: all of that is found by trial, on made-up rows. Each client tests the answer on its own rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.summaries.packed_rows import PackedRows
from hierfl.summaries.reading import Reading

TRIES = 2  # random points
AWAY = 0.5  # their sd about the starting values, unconstrained
NATS, RELATIVE = 1e-3, 1e-6  # differences of log likelihoods that are rounding


class Points(NamedTuple):
    """Random points at which a likelihood is compared with itself.

    z: (T, K) of the global sites.
    w: (T, D) of the local ones.
    """

    z: Tensor
    w: Tensor


def points_to_test(reading: Reading) -> Points:
    """Return the points of a program, the same for all clients."""
    g, size = torch.Generator().manual_seed(0), len(reading.origin)
    z = reading.origin.double() + AWAY * torch.randn(TRIES, size, generator=g)
    return Points(z, AWAY * torch.randn(TRIES, reading.own_size, generator=g))


def misread(rows: PackedRows, batch: ClientBatch, points: Points) -> Tensor:
    """Return 1 for a client whose rows have another log likelihood than was read, else 0, (C,).

    Where it is not finite at a random point, that point says nothing.

    Args:
        rows: of C clients.
        batch: the same, in double precision.
        points: at which it is compared.
    """
    reading = rows.line.reading
    whole = Reading(reading.program, torch.arange(len(reading.origin)), reading.origin)
    found = []
    for z, w in zip(points.z, points.w, strict=True):
        known = whole.log_likelihoods(torch.cat([w, z]), batch)
        own = w
        if reading.effects is not None:
            shift, scale = reading.effects.at(z)
            own = shift + scale @ w
        read = rows.values(torch.cat([own, z[reading.shared]]).expand(rows.clients, 1, -1))[:, 0]
        apart = (read - known).abs() > NATS + RELATIVE * known.abs()
        found.append(apart | (known.isfinite() & ~read.isfinite()))
    return torch.stack(found).any(0).to(known.dtype)
