"""Posteriors of the global sites: functions `(block) -> (batch) -> Drawn` of one vector z (K,)."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import AutoRegressiveNN
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.func import functional_call
from torch.nn.functional import pad, softplus

from hierfl.core import noise
from hierfl.data.batch import ClientBatch
from hierfl.laplace.newton import tril_of
from hierfl.program.program import Params
from hierfl.program.sites import Block, Values

LEAST = 1e-3  # the least share of the box that a piece has, and the least slope
LEVEL = math.log(math.expm1(1.0 - LEAST))  # LEAST + softplus(LEVEL) is 1, the slope of the identity
positive = dist.constraints.softplus_positive


def spline(
    x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, *, bound: float
) -> tuple[Tensor, Tensor]:
    """Apply a monotone rational-quadratic spline on [-bound, bound], and the identity outside.

    Return y and log dg/dx. Widths and heights (..., bins) come before a softmax, inner slopes (...,
    bins - 1) before a softplus; all 0 is the identity. Eq. (4) and (5), Durkan et al. 2019,
    arXiv:1906.04032. Pyro's selects entries by a boolean mask, which `torch.vmap` does not allow.
    """
    left, width = _pieces(widths, bound)
    low, height = _pieces(heights, bound)
    slope = pad(LEAST + softplus(slopes + LEVEL), (1, 1), value=1.0)
    inside = x.clamp(-bound, bound)
    piece = (inside[..., None] >= left).sum(-1, keepdim=True).clamp(min=1) - 1

    def at_piece(values: Tensor) -> Tensor:
        return values.gather(-1, piece)[..., 0]

    w, h = at_piece(width), at_piece(height)
    s0, s1 = at_piece(slope[..., :-1]), at_piece(slope[..., 1:])
    mean_slope, t = h / w, (inside - at_piece(left)) / w
    product = t * (1.0 - t)
    denominator = mean_slope + (s0 + s1 - 2.0 * mean_slope) * product
    y = at_piece(low) + h * (mean_slope * t**2 + s0 * product) / denominator
    numerator = s1 * t**2 + 2.0 * mean_slope * product + s0 * (1.0 - t) ** 2
    log_slope = 2.0 * mean_slope.log() + numerator.log() - 2.0 * denominator.log()
    outside = x.abs() > bound
    return torch.where(outside, x, y), torch.where(outside, 0.0, log_slope)


def _pieces(raw: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return the left ends and the lengths of the pieces of the box, (..., bins) each."""
    share = LEAST + (1.0 - LEAST * raw.shape[-1]) * raw.softmax(-1)
    length = 2.0 * bound * share
    return length.cumsum(-1) - length - bound, length


class SplineFlow(nn.Module):
    """The flow f(e) with its log |det df/de|: splines, then an affine flow, starting near the identity."""

    def __init__(self, size: int, *, hidden: int, bins: int, bound: float = 6.0) -> None:
        super().__init__()
        self.bound = bound
        order: Any = torch.arange(size)
        width = [max(hidden, size)] * 2
        with warnings.catch_warnings():
            # for size 1 Pyro warns that there is nothing to condition on
            warnings.simplefilter("ignore")
            outputs = [bins, bins, bins - 1]
            bends = AutoRegressiveNN(size, width, outputs, order, nonlinearity=nn.Tanh())
            moves = AutoRegressiveNN(size, width, [1, 1], order.flip(0), nonlinearity=nn.Tanh())
        self.bends: Callable[[Tensor], tuple[Tensor, ...]] = bends
        self.moves: Callable[[Tensor], tuple[Tensor, ...]] = moves
        for network in (bends, moves):
            last: Any = network.layers[-1]
            last.weight.data.mul_(0.01)
            last.bias.data.zero_()

    def forward(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(e) (..., size) and log |det df/de| (...) for e (..., size)."""
        bent, log_slope = spline(e, *(p.mT for p in self.bends(e)), bound=self.bound)
        move, log_scale = self.moves(bent)
        return bent * log_scale.exp() + move, (log_slope + log_scale).sum(-1)


class Drawn(NamedTuple):
    """One draw of the global sites."""

    vector: Tensor  # z (K,), unconstrained
    standard: Tensor  # z about its mean, in units of its scale, (K,)
    values: Values


Shared = Callable[[Block], Callable[[ClientBatch], Drawn]]


def emit(block: Block, vector: Tensor, batch: ClientBatch) -> Values:
    """Sample sites as parts of a vector, (K,) or (C, 1, D), each a Delta with its log Jacobian."""
    values, jacobians = block.unflatten(vector)
    for site in block.sites:
        with site.within(batch):
            value, dims = values[site.name], len(site.event_shape)
            cut = dist.Delta(value, log_density=-jacobians[site.name], event_dim=dims)
            pyro.sample(site.name, cut)
    return values


def _drawn(block: Block, fn: Any, loc: Tensor, scale: Tensor, batch: ClientBatch) -> Drawn:
    """Sample the vector z and the sites cut from it."""
    vector = pyro.sample("_shared", fn, infer={"is_auxiliary": True})
    return Drawn(vector, (vector - loc) / scale, emit(block, vector, batch))


def _loc_scale(block: Block, init_scale: float) -> tuple[Tensor, Tensor]:
    """Declare the params of a mean, from the block's start, and of a scale, (K,) each."""
    loc, start = pyro.param("_shared.loc", block.start), torch.full((block.size,), init_scale)
    return loc, pyro.param("_shared.scale", start, constraint=positive)


def full_normal(block: Block, *, init_scale: float = 0.1) -> Callable[[ClientBatch], Drawn]:
    """Return a Normal posterior with all correlations, of K (K + 3) / 2 params.

        q(z) = Normal(loc, (S U)(S U)'),    S = diag(scale),  U unit lower triangular

    Params: `_shared.loc` (K,), `_shared.scale` (K,) > 0 and `_shared.lower` (K, K), the strict
    lower triangle of U.

    Args:
        block: the global sites.
        init_scale: initial standard deviation, > 0. Default 0.1, as in Pyro's AutoNormal.
    """

    def posterior(batch: ClientBatch) -> Drawn:
        loc, scale = _loc_scale(block, init_scale)
        lower = pyro.param("_shared.lower", torch.zeros(block.size, block.size))
        unit = lower.tril(-1) + torch.eye(block.size)
        fn = dist.MultivariateNormal(loc, scale_tril=scale[:, None] * unit)
        return _drawn(block, fn, loc, scale, batch)

    return posterior


def diagonal_normal(block: Block, *, init_scale: float = 0.1) -> Callable[[ClientBatch], Drawn]:
    """Return a Normal posterior without correlations, of 2 K params.

        q(z) = Normal(loc, scale^2)

    Params: `_shared.loc` (K,) and `_shared.scale` (K,) > 0.

    Args:
        block: the global sites.
        init_scale: initial standard deviation, > 0. Default 0.1, as in Pyro's AutoNormal.
    """

    def posterior(batch: ClientBatch) -> Drawn:
        loc, scale = _loc_scale(block, init_scale)
        return _drawn(block, dist.Normal(loc, scale).to_event(1), loc, scale, batch)

    return posterior


def low_rank_normal(
    block: Block, *, rank: int = 4, init_scale: float = 0.1
) -> Callable[[ClientBatch], Drawn]:
    """Return a Normal posterior with the `rank` strongest correlations, of (2 + rank) K params.

        q(z) = Normal(loc, S (F F' + I) S),    S = diag(scale),  F (K, rank)

    Params: `_shared.loc` (K,), `_shared.scale` (K,) > 0 and `_shared.factor` (K, rank).

    Args:
        block: the global sites.
        rank: number of columns of F.
        init_scale: initial value of `scale`, > 0; F starts near 0. Default 0.1, as in Pyro's
            AutoNormal.
    """

    def posterior(batch: ClientBatch) -> Drawn:
        loc, scale = _loc_scale(block, init_scale)
        key = noise.fold(noise.root_key(0), noise.word("_shared.factor"))
        start = 0.1 * noise.normals(key, (block.size, rank))
        factor = pyro.param("_shared.factor", start)
        fn = dist.LowRankMultivariateNormal(loc, scale[:, None] * factor, scale**2)
        return _drawn(block, fn, loc, scale, batch)

    return posterior


def empirical(block: Block, *, size: int = 1000) -> Callable[[ClientBatch], Drawn]:
    """Return a posterior without density: z is one of `size` points, all visited by `size` draws."""
    stride = next(n for n in range(round(0.618 * size), 2 * size + 2) if math.gcd(n, size) == 1)

    def posterior(batch: ClientBatch) -> Drawn:
        points = pyro.param("_shared.points", block.start.expand(size, block.size).clone())
        number = torch.as_tensor(batch.words[-1] if batch.words else 0).long()
        which = ((batch.root[0].long() & 0x7FFFFFFF) + number * stride) % size
        vector = points.index_select(0, which[None])[0]
        scale = points.std(0, correction=0).clamp(min=1e-300)
        return Drawn(vector, (vector - points.mean(0)) / scale, emit(block, vector, batch))

    return posterior


def spline_flow(
    block: Block, *, hidden: int = 16, bins: int = 8, init_scale: float = 0.1
) -> Callable[[ClientBatch], Drawn]:
    """Return a posterior that is a normalizing flow of a standard Normal.

        z = loc + scale f(e),    e ~ Normal(0, I)

    f is a spline flow followed by an affine one, both autoregressive (`SplineFlow`). It is for
    posteriors that no Gaussian fits, such as the long tail of a scale with a half-Cauchy prior and
    few clients, or skewed effects. It needs several particles (8 to 16) and step sizes of 0.01 to
    0.02.

    Params: `_shared.loc` (K,), `_shared.scale` (K,) > 0 and `_shared.flow.<weight>`.

    Args:
        block: the global sites.
        hidden: width of the network of each flow.
        bins: number of pieces of each spline.
        init_scale: initial standard deviation, > 0. Default 0.1, as in Pyro's AutoNormal.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(noise.word("spline_flow") & 0x7FFFFFFF)
        flow = SplineFlow(block.size, hidden=hidden, bins=bins)
    start = {name: value.detach().clone() for name, value in flow.named_parameters()}

    def posterior(batch: ClientBatch) -> Drawn:
        loc, scale = _loc_scale(block, init_scale)
        weights = {name: pyro.param(f"_shared.flow.{name}", value) for name, value in start.items()}
        standard = dist.Normal(torch.zeros(block.size), 1.0).to_event(1)
        noise_ = pyro.sample("_shared", standard, infer={"is_auxiliary": True})
        bent, jacobian = functional_call(flow, weights, (noise_,))
        vector = loc + scale * bent
        # The density of e over the Jacobian is a site of its own: the model has only those of z.
        stretch = dist.Delta(torch.zeros(()), log_density=-jacobian - scale.log().sum())
        pyro.sample("_shared.stretch", stretch, infer={"is_auxiliary": True})
        return Drawn(vector, bent, emit(block, vector, batch))

    return posterior


def normal_params(loc: Tensor, precision: Tensor) -> Params:
    """Return the params of `full_normal`, unconstrained, for Normal(loc, precision^-1)."""
    tril = tril_of(precision)
    scale = tril.diagonal()
    lower = (tril / scale[:, None]).tril(-1)
    return {
        "_shared.loc": loc,
        "_shared.scale": transform_to(positive).inv(scale),
        "_shared.lower": lower,
    }
