"""Laplace's method for a client's own sites given the global ones: the mode of its log joint, and the curvature there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Answer
from hierfl.program.prior_centre import Centre
from hierfl.program.sites import Block, Latents, Model, Values
from hierfl.program.terms import log_joint
from hierfl.program.traces import Site

LogDensity = Callable[[Tensor], Tensor]
CAP = 4.0  # the longest Newton step, in the unconstrained numbers of a client's own sites


def client_density(model: Model, block: Block, shared: Values, batch: ClientBatch) -> LogDensity:
    """The log joint density of each client's own unconstrained vector and rows: (C, 1, d) -> (C,)."""

    def density(vector: Tensor) -> Tensor:
        values, jacobians = block.unflatten(vector)
        # hidden from the guide that asks: these are evaluations, not its sites; params go through, to be answered
        with poutine.block(hide_types=["sample", "observe"]):
            own, _ = log_joint(model, {**shared, **values}, batch, {})
        return own + sum(
            (j.sum([d for d in range(j.dim()) if d != j.dim() - 2]) for j in jacobians.values()),
            torch.zeros(()),
        )

    return density


def prior_centre(model: Model, latents: Latents, shared: Values, batch: ClientBatch) -> Tensor:
    """The middle of the prior of each client's own sites given the global ones, (C, 1, d) unconstrained: where Newton starts."""
    centre = Centre({site.name: site.has_mean for site in latents.sites})
    with poutine.block(hide_types=["sample", "observe"]), Answer({}, batch), centre:
        nodes: dict[str, Site] = (
            poutine.trace(poutine.condition(model, data=shared)).get_trace(batch).nodes
        )
    return latents.local_block.flatten(
        {site.name: nodes[site.name]["value"] for site in latents.local_block.sites}
    )


def curvature(density: LogDensity, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (C, 1, d) and minus the Hessian (C, 1, d, d) of every client's density: reverse over reverse.

    Clients share nothing, so one pull-back along a coordinate gives that row of every client's Hessian.
    """

    def total(v: Tensor) -> Tensor:
        return density(v).sum()

    slope, pull = vjp(grad(total), vector)[:2]

    def row(axis: Tensor) -> Tensor:
        return pull(axis.expand(vector.shape))[0]

    rows = torch.vmap(row)(torch.eye(vector.shape[-1], dtype=vector.dtype))
    return slope, -rows.movedim(0, -2)


def newton_step(slope: Tensor, minus_hessian: Tensor, *, cap: float) -> Tensor:
    """A Newton step uphill that is never longer than `cap`, from a curvature made positive by the size of its eigenvalues."""
    values, vectors = torch.linalg.eigh(minus_hessian)
    floor = 1e-6 * values.abs().amax(-1, keepdim=True) + 1e-12
    along = (vectors.mT @ slope[..., None])[..., 0] / values.abs().clamp(min=floor)
    step = (vectors @ along[..., None])[..., 0]
    return step * (cap / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0)


def climb(density: LogDensity, vector: Tensor, *, steps: int, cap: float = CAP) -> Tensor:
    """Safeguarded Newton to the mode, no gradient kept: (C, 1, d).

    A step that lowers a client's density is halved twice before it is taken, so that separable rows do not throw it out.
    """
    vector = vector.detach()
    for _ in range(steps):
        step = newton_step(*curvature(density, vector), cap=cap)
        tried = torch.stack([density(vector + by * step) for by in (1.0, 0.5, 0.25)])  # (3, C)
        best = torch.tensor([1.0, 0.5, 0.25], dtype=vector.dtype)[
            tried.nan_to_num(nan=-torch.inf).argmax(0)
        ]
        vector = (vector + best[:, None, None] * step).detach()
    return vector


def mode_and_precision(density: LogDensity, near: Tensor) -> tuple[Tensor, Tensor]:
    """Mode (C, 1, d) and precision (C, 1, d, d) there, with right gradients: one differentiable Newton step from the mode.

    At the mode the slope is 0, so d(step) = H^-1 d(slope): the implicit derivative of the mode, at the price of one step.
    """
    slope, minus_hessian = curvature(density, near)
    # inv, not solve: nested derivatives of a batched solve have come out wrong under vmap without gradients
    step = (torch.linalg.inv(minus_hessian) @ slope[..., None])[..., 0]
    mode = near + step * (CAP / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0).detach()
    return mode, curvature(density, mode)[1]
