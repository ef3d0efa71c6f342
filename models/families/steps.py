"""Ordered levels, one step after another: sequential and adjacent-category responses."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hierfl.core.gaussians import log_normal_cdf
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.levels import of_thresholds
from hierfl.models.families.links import count_of, unit_scale
from hierfl.models.priors import Prior
from hierfl.program.recipes import recorded


def sratio_logits(eta: Tensor, thresholds: Tensor, link: str = "logit") -> Tensor:
    """Return log probabilities of ordered levels, (..., K), of which each is reached from the one before.

        P(y = k | y >= k) = F(thresholds_k - eta)

    F is the logistic ("logit") or the standard Normal ("probit") distribution function.

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), or (..., K - 1) of each row; in no order.
        link: "logit" or "probit". Default "logit".
    """
    at = thresholds - eta[..., None]
    log_cdf = logsigmoid if link == "logit" else log_normal_cdf
    passed = log_cdf(-at).cumsum(-1)
    reached = torch.nn.functional.pad(passed[..., :-1], (1, 0))
    return torch.cat([log_cdf(at) + reached, passed[..., -1:]], -1)


def acat_logits(eta: Tensor, thresholds: Tensor) -> Tensor:
    """Return log probabilities of ordered levels up to a constant, (..., K).

        log(P(y = k + 1) / P(y = k)) = eta - thresholds_k

    Args:
        eta: linear predictor, (...).
        thresholds: (K - 1,), or (..., K - 1) of each row; in no order.
    """
    return torch.nn.functional.pad((eta[..., None] - thresholds).cumsum(-1), (1, 0))


def _parameters(response: Response) -> dict[str, Prior]:
    size = count_of(response, "an ordinal response", "levels") - 1
    return {"thresholds": dist.StudentT(3.0, 0.0, 2.5).expand([size]).to_event(1)}


@recorded
def sratio(link: str = "logit") -> ResponseFamily:
    """Return the family of ordered levels that are reached one after another (continuation ratios).

        P(y = k | y >= k) = link^-1(thresholds_k - eta),    thresholds_k ~ StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes it more probable to go on to higher
    levels. With these links `cratio` of brms is the same family. Effects may be another at each
    step: `cs(x)` in a formula.

    Args:
        link: "logit" or "probit". Default "logit", as in brms.

    Raises:
        ValueError: link is none of these.

    Reference: Tutz 1990, British Journal of Mathematical and Statistical Psychology 43:39.
    """
    likelihood = of_thresholds("sratio", link)
    return ResponseFamily(
        "sratio", link, "ordered", likelihood, _parameters, unit_scale, has_intercept=False
    )


@recorded
def acat() -> ResponseFamily:
    """Return the family of ordered levels by the odds of neighboring ones, logit link.

        P(y = k + 1) / P(y = k) = exp(eta - thresholds_k),    thresholds_k ~ StudentT(3, 0, 2.5)

    The response is a code 0, 1, ..., K - 1. A larger eta makes higher levels more probable. Effects
    may be another at each step: `cs(x)` in a formula.
    """
    likelihood = "dist.Categorical(logits=families.acat_logits(eta, thresholds))"
    return ResponseFamily(
        "acat", "logit", "ordered", likelihood, _parameters, unit_scale, has_intercept=False
    )
