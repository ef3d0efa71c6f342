"""The error of Laplace's local integrals, which fedlaplace's weights do not see."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, jacrev

from hierfl.data.absent import RowsNotSaved
from hierfl.laplace.mode import client_density
from hierfl.laplace.trials import alike
from hierfl.posterior.snapshot import Snapshot
from hierfl.program.few_rows import double_precision, in_double
from hierfl.program.handlers import unchecked, untouched_store
from hierfl.program.program import Program

# what a program may raise that is differentiated twice, or whose rows were not saved
FAILS = (RowsNotSaved, RuntimeError, ValueError, TypeError, AttributeError, IndexError)
TRIES = 3  # random points at which the curvature must be the same
UNSEEN = (
    "These weights do not see the error of Laplace's approximation of each client's integral "
    "over its local sites, which was not checked: methods.two_stage(model) does without it, and "
    "diagnostics.against_nuts(fit) shows it where rows may be pooled."
)


def unseen_error(fit: Snapshot) -> str:
    """Return what the weights of a method do not see, in words; "" where they see all."""
    if fit.method.name != "fedlaplace":
        return ""
    try:
        return "" if is_quadratic(fit.program) else UNSEEN
    except FAILS:
        return UNSEEN


def is_quadratic(program: Program) -> bool:
    """Test, at random points on a few rows, whether the log joint is quadratic in local sites."""
    latents = program.latents
    if not latents.local_block.size:
        return True
    with untouched_store(), unchecked(), double_precision():
        g = torch.Generator().manual_seed(0)
        batch = in_double(program.prototype)
        z = latents.global_block.start.double()
        z = z + 0.5 * torch.randn(z.shape, generator=g)
        shared = latents.global_block.unflatten(z)[0]
        density = client_density(program.model, latents.local_block, shared, batch)
        shape = (batch.num_clients, 1, latents.local_block.size)

        def total(w: Tensor) -> Tensor:
            return density(w.view(shape)).sum()

        curvature = jacrev(grad(total))
        start = latents.local_block.start.double().expand(shape).flatten()
        points = [start + torch.randn(start.shape, generator=g) for _ in range(TRIES)]
        known = curvature(start)
        return all(alike(known, curvature(w), exact=1e-6) for w in points)
