"""Links: centers and spreads of a response on their scale, and stable logits; default priors, also as source."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.core.gaussians import log1mexp, log_normal_cdf
from hierfl.models.priors import Prior

LEAST_SCALE = 2.5  # of brms's Student t priors of intercepts and standard deviations
LONGEST = 100  # numbers that an expression may hold
NO_COUNTS = 0.1  # stands for a mean of 0 under a log link, as 0.1 is added to zeros by brms


def intercept_prior(center: float, spread: float, unit: float = 1.0) -> dist.StudentT:
    """Return StudentT(3, center, max(2.5 unit, spread)), brms's default prior of an intercept.

    brms takes the median and the median absolute deviation of the response; here it is the mean and
    the standard deviation, which sums over clients give. brms's least scale of 2.5 is in no unit,
    so that there a response in other units has another prior.

    Args:
        center: of the response on the scale of the linear predictor.
        spread: of the response on that scale.
        unit: of that scale. Default 1: it has none, as that of a logit. A response in units of its
            own has its standard deviation; 0, of a constant response, counts as 1.

    Reference: `set_prior` of brms, section "Population-level effects".
    """
    return dist.StudentT(3.0, center, max(LEAST_SCALE * (unit or 1.0), spread))


def half_student(spread: float, unit: float = 1.0) -> dist.FoldedDistribution:
    """Return half-StudentT(3, 0, max(2.5 unit, spread)), brms's default for standard deviations.

    Args:
        spread: of the response on the scale of the linear predictor.
        unit: as in `intercept_prior`.
    """
    return dist.FoldedDistribution(
        dist.StudentT(3.0, 0.0, max(LEAST_SCALE * (unit or 1.0), spread))
    )


def a_shape(response: Response) -> Prior:
    """Return InverseGamma(0.4, 0.3), the prior of a shape or precision.

    It is brms's default for the shape of a negative binomial (since issue 1614 of brms; A. Vehtari,
    "Default prior for negative-binomial shape parameter", 2024). For the other shapes and
    precisions brms has Gamma(0.01, 0.01), from which nobody can simulate: 40% of its draws are
    below 1e-40, where responses are 0 or infinite in single precision. InverseGamma(0.4, 0.3) is as
    wide upwards, has its mode at 0.2, and vanishes at 0.
    """
    return dist.InverseGamma(0.4, 0.3)


def priors(**makers: Callable[[Response], Prior]) -> Callable[[Response], dict[str, Prior]]:
    """Return what makes the priors of a family's parameters from a response."""
    return lambda response: {name: make(response) for name, make in makers.items()}


def a_share(response: Response) -> Prior:
    """Return Beta(1, 1), the prior of a probability."""
    return dist.Beta(1.0, 1.0)


def a_sigma(response: Response) -> Prior:
    """Return the prior of a standard deviation in the response's unit."""
    return half_student(response.sd, response.sd)


if TYPE_CHECKING:
    from hierfl.models.families.family import Response


def check_link(link: str, links: Sequence[str], family: str) -> None:
    """Refuse a link that a family does not have."""
    if link not in links:
        raise ValueError(f"link is {link!r}: family '{family}' has {', '.join(map(repr, links))}")


def count_of(response: Response, what: str, unit: str) -> int:
    """Return the number of a response's levels or columns; refuse fewer than two."""
    count = len(response.levels)
    if count < 2:
        raise ValueError(f"{what} has {count} {unit}: it needs 2 or more")
    return count


def identity_scale(response: Response) -> tuple[float, float]:
    """Return the mean and standard deviation of the response."""
    return response.mean, response.sd


def log_scale(response: Response) -> tuple[float, float]:
    """Return the log of the mean, and the log-scale sd of a log-normal of that mean and sd."""
    mean = response.mean if response.mean > 0.0 else NO_COUNTS
    return math.log(mean), math.sqrt(math.log1p((response.sd / mean) ** 2))


def inverse_scale(response: Response) -> tuple[float, float]:
    """Return the inverse of the mean, and its spread by the delta method; (0, 2.5) at 0."""
    if response.mean == 0.0:
        return 0.0, 2.5
    return 1.0 / response.mean, response.sd / response.mean**2


def unit_scale(response: Response) -> tuple[float, float]:
    """Return (0, 2.5): for probabilities brms centers nothing, whatever the responses are."""
    return 0.0, 2.5


def probit_logits(eta: Tensor) -> Tensor:
    """Return the log odds of probabilities Phi(eta), finite in both tails.

    Args:
        eta: linear predictor, of any shape.
    """
    return log_normal_cdf(eta) - log_normal_cdf(-eta)


def cloglog_logits(eta: Tensor) -> Tensor:
    """Return the log odds of probabilities 1 - exp(-exp(eta)), finite in both tails.

    Args:
        eta: linear predictor, of any shape. Above 80 it counts as 80, where the probability is 1.
    """
    rate = eta.clamp(max=80.0).exp()
    # log(expm1(rate)) = rate + log1p(-exp(-rate)); below exp(-8), log(rate) + rate / 2 to 1e-8
    small = eta < -8.0
    safe = torch.where(small, torch.ones_like(rate), rate)
    return torch.where(small, eta + 0.5 * rate, safe + log1mexp(safe))


def as_source(prior: Prior) -> str:
    """Return the Python expression of a prior, which evaluates to an equal distribution.

    Names in it are `dist` (pyro.distributions), `torch` and `families` (hierfl.models.families).

    Args:
        prior: a distribution of Pyro with at most 100 numbers, or a known number or tensor.

    Raises:
        TypeError: the prior is a distribution that cannot be written out, such as a masked one.
        ValueError: the prior has more than 100 numbers.

    >>> as_source(dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    'dist.Normal(0.0, 1.0).expand([3]).to_event(1)'
    """
    if not isinstance(prior, torch.distributions.Distribution):
        return _value(torch.as_tensor(prior))
    fn: Any = prior
    if isinstance(fn, torch.distributions.Independent):
        return f"{as_source(fn.base_dist)}.to_event({fn.reinterpreted_batch_ndims})"
    if isinstance(fn, dist.ExpandedDistribution):
        return f"{as_source(fn.base_dist)}.expand({list(fn.batch_shape)})"
    if isinstance(fn, dist.FoldedDistribution):
        return f"dist.FoldedDistribution({as_source(fn.base_dist)})"
    if hasattr(fn, "as_source"):
        return str(fn.as_source())
    name = type(fn).__name__
    if getattr(dist, name, None) is not type(fn) or isinstance(fn, dist.MaskedDistribution):
        raise TypeError(
            f"a {name} cannot be written as an expression: use a distribution of pyro.distributions"
        )
    arguments, end = _given(fn), ""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    is_batch = len(fn.batch_shape) and not fn.event_shape
    if is_batch and all(bool((v == v.flatten()[0]).all()) for v in tensors.values()):
        arguments |= {key: value.flatten()[0] for key, value in tensors.items()}
        end = f".expand({list(fn.batch_shape)})"
    return f"dist.{name}({_arguments(fn, arguments)}){end}"


def _given(fn: Any) -> dict[str, Any]:
    """Return the constructor's arguments of a distribution, name -> value, without defaults."""
    arguments = {}
    for name, parameter in inspect.signature(type(fn).__init__).parameters.items():
        if name in ("self", "validate_args") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        alternatives = {"probs", "logits", "covariance_matrix", "precision_matrix", "scale_tril"}
        if name in alternatives and name not in vars(fn):
            continue
        if not hasattr(fn, name):
            raise TypeError(
                f"a {type(fn).__name__} cannot be written as an expression, since it does not keep "
                f"its '{name}': use another distribution of pyro.distributions"
            )
        arguments[name] = getattr(fn, name)
    if "covariance_matrix" in arguments:
        arguments.pop("scale_tril", None)
    return arguments


def _arguments(fn: Any, values: dict[str, Any]) -> str:
    _, *names = inspect.signature(type(fn).__init__).parameters  # without self
    texts = []
    for place, (name, value) in enumerate(values.items()):
        text = _value(value) if isinstance(value, Tensor) else repr(value)
        texts.append(text if names[place] == name else f"{name}={text}")
    return ", ".join(texts)


def _value(value: Tensor) -> str:
    """Return a tensor as source: a number, or torch.tensor(...) with the fewest exact digits."""
    if value.numel() > LONGEST:
        raise ValueError(
            f"the prior has {value.numel()} numbers, of which {LONGEST} can be written out: "
            f"give fewer, or the prior of one number"
        )
    text = _nested(value.detach().cpu().numpy())
    return f"torch.tensor({text})" if value.dim() else text


def _nested(numbers: Any) -> str:
    if numbers.ndim:
        return f"[{', '.join(_nested(row) for row in numbers)}]"
    return str(numbers) if np.isfinite(numbers) else f"float('{numbers}')"
