"""Laplace's method for the local sites given the global ones: mode and curvature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Answer
from hierfl.program.sites import Block, Latents, Model, Values
from hierfl.program.terms import log_joint
from hierfl.program.traces import Center, Site

LogDensity = Callable[[Tensor], Tensor]
CAP = 4.0  # the longest Newton step, in the unconstrained coordinates of the local sites


def client_density(model: Model, block: Block, shared: Values, batch: ClientBatch) -> LogDensity:
    """Return the log joint density of every client as a function of its unconstrained local vector.

    Args:
        model: the model.
        block: the local sites.
        shared: values of the global sites, by name.
        batch: the rows of C clients.

    Returns:
        A function (C, 1, D) -> (C,).
    """

    def density(vector: Tensor) -> Tensor:
        values, jacobians = block.unflatten(vector)
        # Sites are hidden from the guide that calls this: they are evaluations, not its own. Params
        # are not hidden, so that their values are supplied from outside.
        with poutine.block(hide_types=["sample", "observe"]):
            own, _ = log_joint(model, {**shared, **values}, batch, {})
        return own + sum(
            (j.sum([d for d in range(j.dim()) if d != j.dim() - 2]) for j in jacobians.values()),
            torch.zeros(()),
        )

    return density


def prior_center(model: Model, latents: Latents, shared: Values, batch: ClientBatch) -> Tensor:
    """Return the center of each client's local prior given the global sites: Newton's start.

    Args:
        model: the model.
        latents: its global and local sites.
        shared: values of the global sites, by name.
        batch: the rows of C clients.

    Returns:
        (C, 1, D), unconstrained.
    """
    center = Center({site.name: site.has_mean for site in latents.sites})
    with poutine.block(hide_types=["sample", "observe"]), Answer({}, batch), center:
        nodes: dict[str, Site] = (
            poutine.trace(poutine.condition(model, data=shared)).get_trace(batch).nodes
        )
    return latents.local_block.flatten(
        {site.name: nodes[site.name]["value"] for site in latents.local_block.sites}
    )


def curvature(density: LogDensity, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient and minus Hessian of every client's density, by reverse over reverse mode.

    No client depends on another, so one vector-Jacobian product along a coordinate gives that row
    of every client's Hessian.

    Args:
        density: (C, 1, D) -> (C,).
        vector: (C, 1, D), where the derivatives are taken.

    Returns:
        The gradient (C, 1, D) and minus the Hessian (C, 1, D, D).
    """

    def total(v: Tensor) -> Tensor:
        return density(v).sum()

    slope, pull = vjp(grad(total), vector)[:2]

    def row(axis: Tensor) -> Tensor:
        return pull(axis.expand(vector.shape))[0]

    rows = torch.vmap(row)(torch.eye(vector.shape[-1], dtype=vector.dtype))
    return slope, -rows.movedim(0, -2)


def newton_step(slope: Tensor, minus_hessian: Tensor, *, cap: float) -> Tensor:
    """Return a Newton step uphill, shortened to at most `cap`.

    The curvature is made positive definite by the absolute values of its eigenvalues, so that the
    step leads uphill even where the density is convex.

    Args:
        slope: (..., D) the gradient.
        minus_hessian: (..., D, D).
        cap: the longest step, > 0.

    Returns:
        (..., D).
    """
    values, vectors = torch.linalg.eigh(minus_hessian)
    floor = 1e-6 * values.abs().amax(-1, keepdim=True) + 1e-12
    along = (vectors.mT @ slope[..., None])[..., 0] / values.abs().clamp(min=floor)
    step = (vectors @ along[..., None])[..., 0]
    return step * (cap / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0)


def climb(density: LogDensity, vector: Tensor, *, steps: int, cap: float = CAP) -> Tensor:
    """Climb to the mode of every client's density by safeguarded Newton steps, without a graph.

    Each client takes a step in full, half or quarter length, whichever gives the highest density,
    so that separable rows do not make it diverge.

    Args:
        density: (C, 1, D) -> (C,).
        vector: (C, 1, D), where to start.
        steps: number of Newton steps.
        cap: the longest step.

    Returns:
        (C, 1, D), detached.
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
    """Return the mode and the precision there, with gradients, by one differentiable Newton step.

    At the mode the slope is 0, so d(step) = H^-1 d(slope). This is the implicit derivative of the
    mode, at the cost of one step.

    Args:
        density: (C, 1, D) -> (C,).
        near: (C, 1, D), the mode that `climb` found.

    Returns:
        The mode (C, 1, D) and the precision (C, 1, D, D).
    """
    slope, minus_hessian = curvature(density, near)
    # Not by solve: its nested derivatives come out wrong under vmap without gradients when it is
    # batched.
    step = (torch.linalg.inv(minus_hessian) @ slope[..., None])[..., 0]
    mode = near + step * (CAP / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0).detach()
    return mode, curvature(density, mode)[1]
