"""How the distributions of generalized linear models depend on a row's linear predictor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.laplace.derivatives import softplus
from hierfl.program.traces import Site, in_clients, scored


class Link(NamedTuple):
    """How a distribution depends on its predictor."""

    predictor: Callable[[Any], Tensor]  # distribution -> its eta
    score: Callable[[Any, Tensor, Tensor], Tensor]  # of distribution, labels and another eta


def _counted(
    b: Callable[[Tensor], Tensor], weight: Callable[[Any], Any], at_zero: Callable[[Any], Any]
) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """Return the score y eta - n b(eta) + c(y) of an exponential family in its natural parameter.

    `weight` gives n, and `at_zero` the distribution at eta = 0, of log likelihood c(y) - n b(0).
    """

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
    dist.StudentT: Link(
        lambda fn: fn.loc, lambda fn, y, eta: dist.StudentT(fn.df, eta, fn.scale).log_prob(y)
    ),
}


def has_link(site: Site) -> bool:
    """Return whether a site's distribution may have a predictor; a derived class may differ in density."""
    return any(kind in LINKS for kind in type(site["fn"]).__mro__)


def link_of(site: Site) -> Link:
    """Return how the distribution of a site depends on its predictor."""
    return next(LINKS[kind] for kind in type(site["fn"]).__mro__ if kind in LINKS)


def all_linked(terms: Mapping[str, Site]) -> bool:
    """Return whether every site is in the clients plate and may have a predictor."""
    return all(in_clients(site) and has_link(site) for site in terms.values())


def predictors(terms: Mapping[str, Site]) -> Tensor:
    """Return the predictors of all rows, site after site, (n,)."""
    return torch.cat([link_of(site).predictor(site["fn"]).flatten() for site in terms.values()])


def log_likelihoods(terms: Mapping[str, Site]) -> Tensor:
    """Return each row's log likelihood by the sites' own distributions, site after site, (n,)."""
    each = [scored(site, site["fn"].log_prob(site["value"])).flatten() for site in terms.values()]
    return torch.cat(each)


def scores(terms: Mapping[str, Site], eta: Tensor) -> Tensor:
    """Return the log likelihood of each row at other predictors (n,) than those of the sites, (n,)."""
    sizes = [site["fn"].batch_shape.numel() for site in terms.values()]
    parts = zip(terms.values(), eta.split(sizes), strict=True)
    return torch.cat([_score(site, part) for site, part in parts])


def _score(site: Site, eta: Tensor) -> Tensor:
    fn = site["fn"]
    return scored(site, link_of(site).score(fn, site["value"], eta.view(fn.batch_shape))).flatten()
