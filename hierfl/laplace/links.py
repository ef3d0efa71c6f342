"""Generalized linear models: how distributions depend on a linear predictor, and cheap derivatives."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from numpy.polynomial import Polynomial
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from hierfl.program.traces import Site, in_clients, scored


class _Times(torch.autograd.Function):
    """The product v T of v (*lead, n) and T (*lead, n, m), whose shared leading dims are 1."""

    @staticmethod
    def forward(v: Tensor, matrix: Tensor) -> Tensor:
        lead, shared = v.shape[:-1], matrix.shape[:-2]
        own = max((d + 1 for d, size in enumerate(shared) if size != 1), default=0)
        flat = v.reshape(*lead[:own], -1, v.shape[-1])
        flat = flat @ matrix.reshape(*shared[:own], *matrix.shape[-2:])
        return flat.reshape(*lead, matrix.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return _times(grads[0], matrix.mT), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], v: Tensor, matrix: Tensor
    ) -> tuple[Tensor, int]:
        v_dim, matrix_dim = in_dims
        v = v.expand(info.batch_size, *v.shape) if v_dim is None else v.movedim(v_dim, 0)
        matrix = matrix[None] if matrix_dim is None else matrix.movedim(matrix_dim, 0)
        # Other maps have given v dims that the matrix lacks: there the matrix is shared.
        if matrix.dim() != v.dim() + 1:
            lacking = [1] * (v.dim() + 1 - matrix.dim())
            matrix = matrix.reshape(matrix.shape[0], *lacking, *matrix.shape[1:])
        return _times(v, matrix), 0


_times: Any = _Times.apply


def times(v: Tensor, matrix: Tensor) -> Tensor:
    """Return v @ matrix (m,) for v (n,) and matrix (n, m), which takes no derivative."""
    return _times(v, matrix.detach())


class _Logistic(torch.autograd.Function):
    """The derivative of log(1 + e^x) of an order >= 1: a polynomial in the logistic function."""

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        s = torch.sigmoid(x)
        polynomial, step = Polynomial([0.0, 1.0]), Polynomial([0.0, 1.0, -1.0])  # ds/dx = s - s^2
        for _ in range(order - 1):
            polynomial = polynomial.deriv() * step
        *lower, highest = (float(c) for c in polynomial.coef)
        total = torch.full_like(s, highest)
        for c in reversed(lower):
            total = total * s + c
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.order = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * _logistic(x, ctx.order + 1), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], x: Tensor, order: int
    ) -> tuple[Any, int | None]:
        return _logistic(x, order), in_dims[0]


_logistic: Any = _Logistic.apply


class _Softplus(torch.autograd.Function):
    """The function log(1 + e^x), whose derivatives are those of `_Logistic`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * _logistic(x, 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Any, int | None]:
        return _softplus(x), in_dims[0]


_softplus: Any = _Softplus.apply


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x), entry by entry."""
    if has_torch_function((x,)):  # a mode that records torch's functions takes this for one of them
        return handle_torch_function(softplus, (x,), x)
    return _softplus(x)


class Link(NamedTuple):
    """How a distribution depends on its predictor."""

    predictor: Callable[[Any], Tensor]  # distribution -> its eta
    score: Callable[[Any, Tensor, Tensor], Tensor]  # of distribution, labels and another eta


def _counted(
    b: Callable[[Tensor], Tensor], weight: Callable[[Any], Any], at_zero: Callable[[Any], Any]
) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Return the score y eta - n b(eta) + c(y); `weight` gives n, `at_zero` the distribution at eta = 0."""

    def score(fn: Any, y: Tensor, eta: Tensor) -> Tensor:
        n = weight(fn)
        if not y.is_floating_point():  # torch's Bernoulli refuses labels that are integers
            y = y.to(eta.dtype)
        zero = torch.zeros_like(y)
        return y * eta - n * b(eta) + (at_zero(fn).log_prob(y) + n * b(zero))

    return score


LINKS: Mapping[type, Link] = {
    dist.NegativeBinomial: Link(
        lambda fn: fn.logits,
        lambda fn, y, eta: dist.NegativeBinomial(fn.total_count, logits=eta).log_prob(y),
    ),
    dist.GammaPoisson: Link(
        lambda fn: -fn.rate.log(),
        lambda fn, y, eta: dist.GammaPoisson(fn.concentration, (-eta).exp()).log_prob(y),
    ),
    dist.Gamma: Link(
        lambda fn: -fn.rate.log(),
        lambda fn, y, eta: dist.Gamma(fn.concentration, (-eta).exp()).log_prob(y),
    ),
    dist.Exponential: Link(
        lambda fn: fn.rate.log(), lambda fn, y, eta: dist.Exponential(eta.exp()).log_prob(y)
    ),
    dist.LogNormal: Link(
        lambda fn: fn.loc, lambda fn, y, eta: dist.LogNormal(eta, fn.scale).log_prob(y)
    ),
    dist.Bernoulli: Link(
        lambda fn: fn.logits,
        _counted(
            softplus, lambda fn: 1.0, lambda fn: dist.Bernoulli(logits=torch.zeros_like(fn.logits))
        ),
    ),
    dist.Binomial: Link(
        lambda fn: fn.logits,
        _counted(
            softplus,
            lambda fn: fn.total_count,
            lambda fn: dist.Binomial(fn.total_count, logits=torch.zeros_like(fn.logits)),
        ),
    ),
    dist.Poisson: Link(
        lambda fn: fn.rate.log(),
        _counted(torch.exp, lambda fn: 1.0, lambda fn: dist.Poisson(torch.ones_like(fn.rate))),
    ),
    dist.Normal: Link(lambda fn: fn.loc, lambda fn, y, eta: dist.Normal(eta, fn.scale).log_prob(y)),
    dist.Laplace: Link(
        lambda fn: fn.loc, lambda fn, y, eta: dist.Laplace(eta, fn.scale).log_prob(y)
    ),
    dist.AsymmetricLaplace: Link(
        lambda fn: fn.loc,
        lambda fn, y, eta: dist.AsymmetricLaplace(eta, fn.scale, fn.asymmetry).log_prob(y),
    ),
    dist.StudentT: Link(
        lambda fn: fn.loc, lambda fn, y, eta: dist.StudentT(fn.df, eta, fn.scale).log_prob(y)
    ),
}


def link_of(site: Site) -> Link | None:
    """Return how a distribution depends on its predictor, or None; derived densities may differ."""
    for kind in type(site["fn"]).__mro__:
        if kind in LINKS:
            return LINKS[kind]
    return None


def all_linked(terms: Mapping[str, Site]) -> bool:
    """Return whether every site is in the clients plate and may have a predictor."""
    return all(in_clients(site) and link_of(site) for site in terms.values())


def are_quadratic(terms: Mapping[str, Site]) -> bool:
    """Return whether every row's log likelihood is a quadratic function of its predictor."""
    gaussian = (LINKS[dist.Normal], LINKS[dist.LogNormal])
    return all(link_of(site) in gaussian for site in terms.values())


def predictors(terms: Mapping[str, Site]) -> Tensor:
    """Return the predictors of all rows, site after site, (n,)."""
    values = []
    for site in terms.values():
        link = link_of(site)
        assert link is not None
        values.append(link.predictor(site["fn"]).flatten())
    return torch.cat(values)


def log_likelihoods(terms: Mapping[str, Site]) -> Tensor:
    """Return each row's log likelihood by the sites' own distributions, site after site, (n,)."""
    densities = []
    for site in terms.values():
        densities.append(scored(site, site["fn"].log_prob(site["value"])).flatten())
    return torch.cat(densities)


def scores(terms: Mapping[str, Site], eta: Tensor) -> Tensor:
    """Return the log likelihood of each row at other predictors eta (n,), (n,)."""
    slopes, at = [], 0
    for site in terms.values():
        fn, link = site["fn"], link_of(site)
        assert link is not None
        part, at = eta[at : at + fn.batch_shape.numel()], at + fn.batch_shape.numel()
        term = link.score(fn, site["value"], part.view(fn.batch_shape))
        slopes.append(scored(site, term).flatten())
    return torch.cat(slopes)
