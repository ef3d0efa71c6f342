"""Proposals of clients' mixing parameters that move with the global sites, as a posterior's do.

Modes of p(t | z) factor(v) at draws of z give a line by ridge regression. From it Newton steps go to
the mode at any z, and the curvature there is the scale: without it chains meet a funnel, and the
joint density grows without end where a prior is narrow.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.laplace.mode import CAP, LogDensity, curvature
from hierfl.program.sites import Values
from hierfl.summaries.conditional import LEAST, Proposal, mixing_density, mixing_modes
from hierfl.summaries.hierarchy import Hierarchy

RIDGE = 1.0  # of standardized numbers, in draws
STEPS = 1  # Newton's, from the line


class MixingLine(NamedTuple):
    """About where N clients' t (M,) lie, by z (K,)."""

    loc: Tensor  # (N, M) at the center
    slope: Tensor  # (N, M, K)
    center: Tensor  # (K,)

    def at(self, z: Tensor) -> Tensor:
        """Return t (N, M) at z (K,)."""
        return self.loc + self.slope @ (z - self.center)


def line_of(
    hierarchy: Hierarchy, draws_z: Tensor, fields: Values, factor: tuple[Tensor, Tensor]
) -> MixingLine:
    """Return where mixing parameters lie about draws of z (F, K), of clients with factors (N, V, V) and (N, V)."""
    mixing, center = hierarchy.mixing, draws_z.mean(0)
    if mixing is None:
        none = torch.zeros(len(factor[1]), 0)
        return MixingLine(none, none[..., None].expand(-1, 0, len(center)), center)
    spread = draws_z.std(0, correction=0).clamp(min=1e-6)
    x = (draws_z - center) / spread
    project = torch.linalg.solve(x.mT @ x + RIDGE * torch.eye(x.shape[1]), x.mT)  # (K, F)

    def of_client(precision: Tensor, shift: Tensor, own: Values) -> tuple[Tensor, Tensor]:
        row = hierarchy.batch({name: v[None] for name, v in own.items()})
        density = mixing_density(hierarchy, row, (precision[None], shift[None]))
        modes = mixing_modes(density, draws_z, mixing.center)[0]
        loc = modes.mean(0)
        return loc, (project @ (modes - loc)).mT / spread

    return MixingLine(*torch.vmap(of_client)(*factor, fields), center)


def laplace_at(density: LogDensity, t: Tensor) -> Proposal:
    """Return proposals by the modes near t (N, M) of a density (N, 1, M) -> (N,), and its curvatures."""
    for _ in range(STEPS):
        slope, minus_hessian = curvature(density, t[:, None])
        covariance = _covariance(minus_hessian[:, 0])
        step = (covariance @ slope[:, 0, :, None])[..., 0]
        t = t + step * (CAP / (step.square().sum(-1, keepdim=True) + 1e-12).sqrt()).clamp(max=1.0)
    covariance = _covariance(curvature(density, t[:, None])[1][:, 0])
    return Proposal(t, torch.linalg.cholesky_ex(covariance).L)


def _covariance(minus_hessian: Tensor) -> Tensor:
    """Return the inverse of curvatures (N, M, M), or of their diagonals where they are nearly flat."""
    eye = torch.eye(minus_hessian.shape[-1])
    flat = torch.linalg.cholesky_ex(minus_hessian.detach() - LEAST * eye).info > 0
    diagonal = torch.diag_embed(minus_hessian.diagonal(dim1=-2, dim2=-1).abs().clamp(min=LEAST))
    safe = torch.where(flat[:, None, None], diagonal, minus_hessian)
    return torch.linalg.inv_ex(safe).inverse
