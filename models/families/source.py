"""`as_source`: a prior as the Python expression that makes it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from hierfl.models.families.levels import Ordered
from hierfl.models.priors import Prior

LONGEST = 100  # numbers that an expression may hold


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
    if isinstance(fn, Ordered):
        text = f"families.Ordered({as_source(fn.base)}, {fn.size})"
        return f"{text}.expand({list(fn.batch_shape)})" if len(fn.batch_shape) else text
    name = type(fn).__name__
    if getattr(dist, name, None) is not type(fn) or isinstance(fn, dist.MaskedDistribution):
        raise TypeError(
            f"a {name} cannot be written as an expression: use a distribution of pyro.distributions"
        )
    arguments = _given(fn)
    if not len(fn.batch_shape) or fn.event_shape:
        return f"dist.{name}({_arguments(fn, arguments)})"
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    if not all(bool((value == value.flatten()[0]).all()) for value in tensors.values()):
        return f"dist.{name}({_arguments(fn, arguments)})"
    arguments |= {key: value.flatten()[0] for key, value in tensors.items()}
    return f"dist.{name}({_arguments(fn, arguments)}).expand({list(fn.batch_shape)})"


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
    texts, positional = [], True
    for name in inspect.signature(type(fn).__init__).parameters:
        if name in ("self", "validate_args"):
            continue
        if name not in values:
            positional = False
            continue
        value = values[name]
        text = _value(value) if isinstance(value, Tensor) else repr(value)
        texts.append(text if positional else f"{name}={text}")
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
