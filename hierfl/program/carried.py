"""Densities of Pyro that write into tensors or branch on values, as functions that vmap carries."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import hmm
from pyro.ops import gaussian, tensor_utils
from torch import Tensor
from torch.distributions.utils import broadcast_all, vec_to_tril_matrix

from hierfl.core.gaussians import LOG_2_PI, log_normal_cdf

BY_HAND = 4  # entries of a Normal vector at most, which are solved for one after the other


def _accept(self: Any, value: Tensor) -> None:
    """Accept a value, whatever it is: a traced function has none to read."""


def _multinomial(self: Any, value: Tensor) -> Tensor:
    logits, value = broadcast_all(self.logits, value)
    orders = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    powers = logits.where((value != 0) | (logits != -math.inf), logits.new_zeros(())) * value
    total: Tensor = orders + powers.sum(-1)
    return total


def _ordered(self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: Any = None) -> None:
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor = predictor.expand(below.shape[:-1])
    self.cutpoints = cutpoints.expand(below.shape)
    between = below[..., 1:] - below[..., :-1]
    probs = torch.cat([below[..., :1], between, 1 - below[..., -1:]], -1)
    dist.Categorical.__init__(self, probs, validate_args=validate_args)


def _nan_normal(self: Any, value: Tensor) -> Tensor:
    ok = value.isfinite()
    density: Tensor = dist.Normal.log_prob(self, value.where(ok, self.loc))
    return density.where(ok, torch.zeros_like(density))


def _joint_normal(self: Any, value: Tensor) -> Tensor:
    """Solve for the standard normals of few entries by hand: LAPACK takes matrices one by one."""
    tril, away = self._unbroadcasted_scale_tril, value - self.loc
    size = away.shape[-1]
    if size > BY_HAND:
        density: Tensor = _torchs_joint_normal(self, value)
        return density
    normals: list[Tensor] = []
    for i in range(size):
        rest = sum((tril[..., i, j] * normals[j] for j in range(i)), torch.zeros(()).to(away))
        normals.append((away[..., i] - rest) / tril[..., i, i])
    square = sum((e.square() for e in normals[1:]), normals[0].square())
    log_scale = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (square + size * LOG_2_PI) - log_scale


def _nan_joint_normal(self: Any, value: Tensor) -> Tensor:
    """Give missing entries a standard normal of their own, at its mode, and take its density away."""
    ok = value.isfinite()
    pairs = ok[..., :, None] & ok[..., None, :]
    covariance = self.covariance_matrix
    covariance = covariance.where(pairs, torch.eye(value.shape[-1]).to(covariance))
    fn = dist.MultivariateNormal(self.loc, covariance, validate_args=False)
    absent = (~ok).to(value).sum(-1)
    return fn.log_prob(value.where(ok, self.loc)) + 0.5 * LOG_2_PI * absent


def _safe_log(x: Tensor) -> Tensor:
    """Return log x, whose gradient is at most 1 / eps."""
    least, there = torch.finfo(x.dtype).eps, x.detach()
    return (there.log() + (x - there) / least).where(x < least, x.clamp(min=least).log())


def _log_matmul_exp(x: Tensor, y: Tensor) -> Tensor:
    """Return log(e^x e^y), by shifts that are no changes in place: vmap would take these one by one."""
    least = torch.finfo(x.dtype).min  # -inf less -inf is no number
    row = x.detach().amax(-1, keepdim=True).clamp(min=least)
    column = y.detach().amax(-2, keepdim=True).clamp(min=least)
    return _safe_log((x - row).exp() @ (y - column).exp()) + row + column


def _safe_cholesky(x: Tensor) -> Tensor:
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1 or not relative:
        return _pyros_cholesky(x)
    largest = x.detach().abs().max(-1).values
    jitter = relative * torch.finfo(x.dtype).eps * largest
    factor: Tensor = torch.linalg.cholesky(x + torch.diag_embed(jitter))
    return factor


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1:
        return _torchs_one_hot(tensor, num_classes)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _sticks(self: Any, x: Tensor) -> Tensor:
    """Return probabilities; second derivatives of torch's products would be taken one by one."""
    odds = x - torch.arange(x.shape[-1], 0, -1).to(x).log()
    left = (-torch.nn.functional.softplus(odds)).cumsum(-1).exp()
    pad = torch.nn.functional.pad
    return pad(torch.sigmoid(odds), [0, 1], value=1) * pad(left, [1, 0], value=1)


def _correlations(self: Any, x: Tensor) -> Tensor:
    """Return a Cholesky factor of correlations, likewise."""
    partial, least = torch.tanh(x), torch.finfo(x.dtype).eps
    r = vec_to_tril_matrix(partial.clamp(least - 1.0, 1.0 - least), diag=-1)
    left = (0.5 * torch.log1p(-r.square())).cumsum(-1).exp()
    left = torch.nn.functional.pad(left[..., :-1], [1, 0], value=1)
    return (r + torch.eye(r.shape[-1]).to(r)) * left


_torchs_joint_normal: Any = torch.distributions.MultivariateNormal.log_prob
_torchs_one_hot: Any = torch.nn.functional.one_hot


def _cholesky(x: Tensor) -> Tensor:
    """Return NaN where a matrix is not positive definite, as one of many draws may be by rounding."""
    decomposed = torch.linalg.cholesky_ex(x)
    factor: Tensor = decomposed.L.masked_fill(decomposed.info[..., None, None] != 0, math.nan)
    return factor


_pyros_cholesky: Any = tensor_utils.safe_cholesky
# what `handlers.unchecked` replaces: (where, its name) -> by what
CARRIED: tuple[tuple[Any, str, Any], ...] = (
    (torch.distributions.Distribution, "_validate_sample", _accept),
    (torch.distributions.Multinomial, "log_prob", _multinomial),
    (dist.OrderedLogistic, "__init__", _ordered),
    (torch.distributions.MultivariateNormal, "log_prob", _joint_normal),
    (dist.NanMaskedNormal, "log_prob", _nan_normal),
    (dist.NanMaskedMultivariateNormal, "log_prob", _nan_joint_normal),
    (torch.nn.functional, "one_hot", _one_hot),
    (torch.special, "log_ndtr", log_normal_cdf),
    (torch.distributions.StickBreakingTransform, "_call", _sticks),
    (torch.distributions.CorrCholeskyTransform, "_call", _correlations),
    (hmm, "_logmatmulexp", _log_matmul_exp),
    (hmm, "safe_cholesky", _safe_cholesky),
    (gaussian, "safe_cholesky", _safe_cholesky),
)
# a draw whose matrix is not positive definite is NaN, not the end of all draws
OF_MANY_DRAWS = ((torch.linalg, "cholesky", _cholesky),)
