"""Ordinal responses: levels in order, by thresholds on a latent scale."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.links import (
    check_link,
    log1mexp,
    log_normal_between,
    log_normal_cdf,
    unit_scale,
)
from hierfl.models.families.ordered import Ordered
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded

LIKELIHOODS = {
    "logit": "dist.Categorical(logits=families.cumulative_logits(eta, thresholds))",
    "probit": "dist.Categorical(logits=families.cumulative_logits(eta, thresholds, 'probit'))",
}


def cumulative_logits(eta: Tensor, thresholds: Tensor, link: str = "logit") -> Tensor:
    """Return log probabilities of ordered levels, (..., K), finite in both tails.

        log P(y = k) = log(F(thresholds_k - eta) - F(thresholds_{k - 1} - eta))

    F is the logistic ("logit") or the standard Normal ("probit") distribution function; the lowest
    threshold is -infinity, the highest infinity. dist.OrderedLogistic subtracts probabilities, and
    its log densities stop near -16 in single precision.

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), increasing.
        link: "logit" or "probit". Default "logit".
    """
    at = thresholds - eta[..., None]
    low, high = at[..., :-1], at[..., 1:]
    if link == "logit":
        # F(b) - F(a) = F(b) F(-a) (1 - exp(a - b))
        inner = logsigmoid(high) + logsigmoid(-low) + log1mexp(high - low)
        ends = logsigmoid(at[..., :1]), logsigmoid(-at[..., -1:])
    else:
        inner = log_normal_between(low, high)
        ends = log_normal_cdf(at[..., :1]), log_normal_cdf(-at[..., -1:])
    return torch.cat([ends[0], inner, ends[1]], -1)


def _parameters(response: Response) -> dict[str, Prior]:
    size = len(response.levels) - 1
    if size < 1:
        raise ValueError(
            f"an ordinal response has {len(response.levels)} levels: it needs 2 or more"
        )
    return {"thresholds": Ordered(dist.StudentT(3.0, 0.0, 2.5), size)}


@recorded
def cumulative(link: str = "logit") -> ResponseFamily:
    """Return the family of ordered levels (proportional odds), with thresholds as intercept.

        P(y <= k) = link^-1(thresholds_k - eta),    thresholds: ordered draws of StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes higher levels more probable.

    Args:
        link: "logit" or "probit". Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.

    >>> cumulative().has_intercept
    False
    """
    check_link(link, [*LIKELIHOODS], "cumulative")
    return ResponseFamily(
        name="cumulative",
        link=link,
        kind="ordered",
        likelihood=LIKELIHOODS[link],
        parameters=_parameters,
        scale=unit_scale,
        has_intercept=False,
    )
