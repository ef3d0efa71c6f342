"""Maps of real numbers onto supports that torch has none for: mixtures, and covariance matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributions.constraints as constraints
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.distributions.transforms import Transform


def _of_components(constraint: Any) -> Transform:
    """Return the map onto the support of a mixture's components, which is that of the mixture."""
    base = constraint.base_constraint
    if any(isinstance(bound, Tensor) and bound.dim() for bound in vars(base).values()):
        raise NotImplementedError("components of several supports have no map in common")
    return biject_to(base)


class LogCholesky(Transform):
    """Covariance matrices L L' of n (n + 1) / 2 numbers: L by rows, its diagonal as logs.

    log |d Sigma / d x| = n log 2 + sum_i (n + 1 - i) x_ii,    i = 0, ..., n - 1, entries below the
    diagonal counted once (Pinheiro and Bates 1996, Stat. Comput. 6).
    """

    domain = constraints.real_vector
    codomain = constraints.positive_definite
    bijective = True

    def __eq__(self, other: object) -> bool:
        """All are the same."""
        return isinstance(other, LogCholesky)

    __hash__ = Transform.__hash__

    def _call(self, x: Tensor) -> Tensor:
        n = _order(x.shape[-1])
        row, column = torch.tril_indices(n, n, device=x.device)
        place = torch.nn.functional.one_hot(row * n + column, n * n).to(x)
        tril = (torch.where(row == column, x.exp(), x) @ place).reshape(*x.shape[:-1], n, n)
        return tril @ tril.mT

    def _inverse(self, y: Tensor) -> Tensor:
        tril = torch.linalg.cholesky(y)
        row, column = torch.tril_indices(*y.shape[-2:], device=y.device)
        entries: Tensor = tril[..., row, column]
        return torch.where(row == column, entries.abs().log(), entries)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log Jacobian, without the event's dimension."""
        n = _order(x.shape[-1])
        at = torch.arange(n, device=x.device)
        diagonal = x[..., at * (at + 3) // 2]
        return n * math.log(2.0) + (diagonal * (n + 1 - at)).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        """Return the shape of matrices."""
        n = _order(shape[-1])
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """Return the shape of their numbers."""
        return torch.Size((*shape[:-2], shape[-1] * (shape[-1] + 1) // 2))


def _order(numbers: int) -> int:
    """Return n of n (n + 1) / 2 numbers."""
    return (math.isqrt(8 * numbers + 1) - 1) // 2


def register_maps() -> None:
    """Let `biject_to` know the maps; newer releases of torch have a type for mixtures' support."""
    biject_to.register(type(constraints.positive_definite), lambda constraint: LogCholesky())
    if hasattr(constraints, "MixtureSameFamilyConstraint"):
        biject_to.register(constraints.MixtureSameFamilyConstraint, _of_components)
        transform_to.register(constraints.MixtureSameFamilyConstraint, _of_components)
