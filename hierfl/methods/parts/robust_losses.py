"""Losses in place of the negative log likelihood of a row, bounded where a row is an outlier.

With c = `power` and I = the integral of p^(1 + c) over all labels,

    beta           L = (1 - p^c) / c + (I - 1) / (1 + c),        beta = 1 + c
    gamma          L = (1 + c) / c (1 - p^c I^(-c / (1 + c))),   gamma = 1 + c
    cross_entropy  L = (1 - p^c) / c,                            for classes

each is -log p as c -> 0, up to terms that depend on nothing.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pyro.distributions as dist
import torch
import torch.distributions as torch_dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.program.program import Program, ProgramError
from hierfl.program.traces import AtSites, Site
from hierfl.program.wrapped import under

Loss = Literal["likelihood", "beta", "gamma", "cross_entropy"]
LOSSES = get_args(Loss)
CLASSES = (torch_dist.Bernoulli, torch_dist.Categorical)


def with_loss(program: Program, loss: Loss, power: float) -> Program:
    """Return a program in which minus a loss takes the place of each row's log likelihood."""
    if loss == "likelihood":
        return program
    inside = [site.name for site in program.latents.local_block.sites]
    if inside:
        raise ProgramError(
            f"loss={loss!r} is of models whose sites are all global, and '{inside[0]}' is local: "
            "its marginal likelihood is not a product over rows; use loss='likelihood'"
        )
    whole = [*program.joint, *program.factors]
    if whole:
        raise ProgramError(
            f"loss={loss!r} needs a distribution of each row, and '{whole[0]}' is none: observe "
            "rows in batch.data(), or use loss='likelihood'"
        )

    def score_labels(site: Site) -> None:
        if site["name"] in program.labels:
            site["fn"] = _Score(site["fn"], loss, power)

    return replace(program, model=under(program.model, lambda _: AtSites(score_labels)))


@dataclass(frozen=True)
class _Score:
    """A distribution's place in a trace, whose `log_prob` is minus a loss."""

    fn: Any
    loss: Loss
    power: float

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "fn"), name)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return minus the loss of labels, of the distribution's batch shape."""
        return score(self.fn, value, self.loss, self.power)


def score(fn: Any, value: Tensor, loss: Loss, power: float) -> Tensor:
    """Return minus a loss of labels under their distribution."""
    if isinstance(fn, dist.MaskedDistribution):
        inside = score(fn.base_dist, value, loss, power)
        return torch.where(torch.as_tensor(fn._mask), inside, torch.zeros_like(inside))
    log_p = fn.log_prob(value)
    if loss == "cross_entropy":
        if not isinstance(_base(fn), CLASSES):
            raise ProgramError(
                f"loss='cross_entropy' is of classes, and the likelihood is {_name(fn)}: use loss='beta' or 'gamma'"
            )
        return torch.expm1(power * log_p) / power
    whole = log_integral(fn, power)
    if loss == "beta":
        return torch.expm1(power * log_p) / power - torch.expm1(whole) / (1.0 + power)
    bent = torch.expm1(power * (log_p - whole / (1.0 + power)))
    return (1.0 + power) / power * bent


def log_integral(fn: Any, power: float) -> Tensor:
    """Return log of the integral of p^(1 + power) over all labels, of the batch shape."""
    base, exponent = _base(fn), 1.0 + power
    if isinstance(fn, torch_dist.Independent):
        summands = log_integral(fn.base_dist, power)
        return summands.sum(tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if isinstance(base, torch_dist.Normal):
        log_sum = -power * (base.scale.log() + 0.5 * math.log(2.0 * math.pi)) - 0.5 * math.log(
            exponent
        )
    elif isinstance(base, torch_dist.Categorical):
        log_sum = (exponent * base.logits.log_softmax(-1)).logsumexp(-1)
    elif isinstance(base, torch_dist.Bernoulli):
        log_sum = torch.logaddexp(
            exponent * logsigmoid(base.logits), exponent * logsigmoid(-base.logits)
        )
    else:
        raise ProgramError(
            f"loss='beta' and 'gamma' need the integral of a power of the likelihood, known here "
            f"for Normal, Bernoulli and Categorical labels, and this one is {_name(fn)}: use loss='likelihood'"
        )
    return log_sum.expand(fn.batch_shape)


def _base(fn: Any) -> Any:
    """Return a distribution without what gives it a larger batch shape, or makes dimensions events."""
    while isinstance(fn, dist.ExpandedDistribution | torch_dist.Independent):
        fn = fn.base_dist
    return fn


def _name(fn: Any) -> str:
    return type(_base(fn)).__name__
