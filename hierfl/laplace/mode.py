"""Laplace's method for the local sites given the global ones: mode and curvature."""

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor
from torch.func import grad, vjp

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import Substitute, log_joint
from hierfl.program.sites import Block, Latents, Model, Values
from hierfl.program.traces import Center, Site

LogDensity = Callable[[Tensor], Tensor]
CAP = 4.0  # the longest Newton step, in the unconstrained coordinates of the local sites


def client_density(model: Model, block: Block, shared: Values, batch: ClientBatch) -> LogDensity:
    """Return the log joint of every client, (C, 1, D) -> (C,), in the local sites of a block."""

    def density(vector: Tensor) -> Tensor:
        values, jacobians = block.unflatten(vector)
        # Sites are hidden from the calling guide, whose own they are not; params come from outside.
        with poutine.block(hide_types=["sample", "observe"]):
            own, _ = log_joint(model, {**shared, **values}, batch, {})
        return own + sum(
            (j.sum([d for d in range(j.dim()) if d != j.dim() - 2]) for j in jacobians.values()),
            torch.zeros(()),
        )

    return density


def prior_center(model: Model, latents: Latents, shared: Values, batch: ClientBatch) -> Tensor:
    """Return the center of each client's local prior given the global sites, (C, 1, D)."""
    center = Center({site.name: site.has_mean for site in latents.sites})
    with poutine.block(hide_types=["sample", "observe"]), Substitute({}, batch), center:
        trace = poutine.trace(poutine.condition(model, data=shared)).get_trace(batch)
    block, nodes = latents.local_block, dict[str, Site](trace.nodes)
    return block.flatten({site.name: nodes[site.name]["value"] for site in block.sites})


def curvature(density: LogDensity, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient (C, 1, D) and minus Hessian (C, 1, D, D): one product a coordinate, for all clients."""

    def total(v: Tensor) -> Tensor:
        return density(v).sum()

    slope, pull = vjp(grad(total), vector)[:2]

    def row(axis: Tensor) -> Tensor:
        return pull(axis.expand(vector.shape))[0]

    rows = torch.vmap(row)(torch.eye(vector.shape[-1], dtype=vector.dtype))
    return slope, -rows.movedim(0, -2)


def newton_step(slope: Tensor, minus_hessian: Tensor, *, cap: float) -> Tensor:
    """Return a Newton step uphill, (..., D), by absolute eigenvalues, shortened to at most `cap`."""
    values, vectors = torch.linalg.eigh(minus_hessian)
    floor = 1e-6 * values.abs().amax(-1, keepdim=True) + 1e-12
    along = (vectors.mT @ slope[..., None])[..., 0] / values.abs().clamp(min=floor)
    step = (vectors @ along[..., None])[..., 0]
    return step * (cap / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0)


def climb(density: LogDensity, vector: Tensor, *, steps: int, cap: float = CAP) -> Tensor:
    """Climb to every client's mode (C, 1, D), detached, by the best of full, half and quarter steps."""
    vector = vector.detach()
    for _ in range(steps):
        step = newton_step(*curvature(density, vector), cap=cap)
        tried = torch.stack([density(vector + by * step) for by in (1.0, 0.5, 0.25)])  # (3, C)
        at = tried.nan_to_num(nan=-torch.inf).argmax(0)
        best = torch.tensor([1.0, 0.5, 0.25], dtype=vector.dtype)[at]
        vector = (vector + best[:, None, None] * step).detach()
        if is_settled(step, vector):
            break
    return vector


def is_settled(step: Tensor, at: Tensor) -> bool:
    """Return whether one more Newton step would be rounding; never under vmap or grad, where numbers cannot be read."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    # The error after a step is about its length squared.
    return bool((step.abs() <= torch.finfo(step.dtype).eps ** 0.5 * (1.0 + at.abs())).all())


def mode_and_precision(density: LogDensity, near: Tensor) -> tuple[Tensor, Tensor]:
    """Return mode (C, 1, D) and precision (C, 1, D, D) with implicit gradients, by one step from `near`."""
    slope, minus_hessian = curvature(density, near)
    # Avoid solve: its nested derivatives are wrong under vmap without gradients if it is batched.
    step = (torch.linalg.inv(minus_hessian) @ slope[..., None])[..., 0]
    mode = near + step * (CAP / (step.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0).detach()
    return mode, curvature(density, mode)[1]
