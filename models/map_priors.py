"""Priors of weights that are learned above the clients: FedMAP's, some of them no densities but penalties.

Each is a frozen dataclass of three functions of one tensor: `above(name, start)` declares what is learned, `given(above)` is the
prior of a client's own tensor, `hyper(above)` a penalty on what is learned. Where there is a closed form, `best(above, mean, spread)`
is what minimises the weighted mean of -log prior over clients whose tensors have that mean and that variance about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from hierfl.core import noise

__all__ = ["InputConvex", "Isotropic", "LearnedNormal", "LearnedVariance", "MapPrior", "Penalised"]

Above = dict[str, Tensor]


class MapPrior(Protocol):
    """What stands above the clients' own tensors."""

    def above(self, name: str, start: Tensor) -> Above:
        """Declare the global params of the tensor `name`; `theta` is what a client's tensor starts from."""

    def given(self, above: Above) -> Any:
        """The prior of a client's tensor, a distribution of event shape `theta.shape` with mean theta."""

    def hyper(self, above: Above) -> Tensor:
        """A penalty on the global params themselves, ()."""


class Penalised(TorchDistribution):
    """A weight's tensor under exp(-penalty(w)): without its normaliser, so good for points (a delta guide), not for draws.

    Args:
        centre: (*event,), where guides start.
        penalty: w (*event,) -> (), smooth.
        batch_shape: of the plates it stands in.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's own form)

    def __init__(
        self, centre: Tensor, penalty: Callable[[Tensor], Tensor], batch_shape: tuple[int, ...] = ()
    ) -> None:
        self.centre, self.penalty = centre, penalty
        super().__init__(torch.Size(batch_shape), centre.shape, validate_args=False)

    @property
    def support(self) -> Any:
        """All of R^n."""
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """The centre."""
        return self.centre.expand(self.batch_shape + self.event_shape)

    def expand(self, batch_shape: Any, _instance: object = None) -> Penalised:
        """The same in other plates."""
        return Penalised(self.centre, self.penalty, tuple(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Minus the penalty of each tensor, (*batch,)."""
        events = value.reshape(-1, *self.event_shape)
        lead = value.shape[: value.dim() - len(self.event_shape)]
        each = (
            torch.stack([-self.penalty(v) for v in events.unbind(0)])
            if len(events) > 1
            else -self.penalty(events[0])[None]
        )
        return each.reshape(lead).expand(torch.broadcast_shapes(lead, self.batch_shape))


def _theta(name: str, start: Tensor) -> Tensor:
    value: Tensor = pyro.param(f"theta.{name}", start.clone)
    return value


@dataclass(frozen=True)
class Isotropic:
    """w_k ~ Normal(theta, variance) up to its constant: the penalty |w_k - theta|^2 / (2 variance), FedMAP's Eq. (6) and (7).

    Args:
        variance: sigma^2 > 0. Default: the authors' shipped configuration.
    """

    variance: float = 15.0

    def __post_init__(self) -> None:
        """Refuse what is no variance."""
        _positive(variance=self.variance)

    def above(self, name: str, start: Tensor) -> Above:
        """Theta."""
        return {"theta": _theta(name, start)}

    def given(self, above: Above) -> Penalised:
        """The penalty about theta."""
        theta = above["theta"]
        return Penalised(theta, lambda w: (w - theta).square().sum() / (2.0 * self.variance))

    def hyper(self, above: Above) -> Tensor:
        """None."""
        return torch.zeros(())

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """Theta <- the clients' mean."""
        return {"theta": mean}


@dataclass(frozen=True)
class LearnedVariance:
    """A weight's own precision, learned as the paper has it (A.2, Eq. 18 and Lemma 1): no density, for it has no normaliser.

        R = sum_j alpha(s_j)/2 (w_j - theta_j)^2 + eps (s_j^2 + theta_j^2),    alpha(s) = 1 / (s + c),  s > -c

    Without the normaliser s is no variance: at the optimum s (s + c)^2 = V / (4 eps) with V the clients' spread, so that it is eps
    that decides. For one that is a variance take `LearnedNormal`.

    Args:
        c: > 0. Default: A.4's, as is eps.
        eps: > 0.
    """

    c: float = 1.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse what is not positive."""
        _positive(c=self.c, eps=self.eps)

    def above(self, name: str, start: Tensor) -> Above:
        """Theta, and s from 0."""
        return {"theta": _theta(name, start), "s": pyro.param(f"s.{name}", torch.zeros_like(start))}

    def alpha(self, s: Tensor) -> Tensor:
        """The precision; s is kept off -c, where it would be infinite."""
        return 1.0 / (s.clamp(min=-0.999 * self.c) + self.c)

    def given(self, above: Above) -> Penalised:
        """The part of R that a client's weights are in."""
        theta, precision = above["theta"], self.alpha(above["s"])
        return Penalised(theta, lambda w: (precision * (w - theta).square()).sum() / 2.0)

    def hyper(self, above: Above) -> Tensor:
        """The rest of R."""
        return self.eps * (above["theta"].square().sum() + above["s"].square().sum())

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """One exact step in theta, then in s: theta = alpha mean / (alpha + 2 eps), and s > 0 solves s (s + c)^2 = V / (4 eps)."""
        alpha = self.alpha(gamma["s"])
        theta = alpha * mean / (alpha + 2.0 * self.eps)
        wanted = (spread + (mean - theta).square()) / (4.0 * self.eps)
        s = wanted ** (1.0 / 3.0)  # above the root, from where Newton's steps fall monotonically
        for _ in range(60):
            s = s - (s * (s + self.c).square() - wanted) / ((s + self.c) * (3.0 * s + self.c))
        return {"theta": theta, "s": s}


@dataclass(frozen=True)
class LearnedNormal:
    """w_k ~ Normal(theta, v), a variance learned for each weight: a density, its normaliser with it (empirical Bayes).

    The joint mode in (w, v) has v = 0 and all clients alike, so v has a scaled inverse chi-squared hyper-prior: as if besides the
    clients (whose weights sum to 1) `strength` more of them lay `typical` away from theta.

    Args:
        start: v before the first round.
        strength: > 0, of the hyper-prior, 1: as strong as all clients together.
        typical: > 0, the distance it expects, a standard deviation.
    """

    start: float = 0.01
    strength: float = 0.5
    typical: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what is not positive."""
        _positive(start=self.start, strength=self.strength, typical=self.typical)

    def above(self, name: str, start: Tensor) -> Above:
        """Theta and log v."""
        begin = torch.full_like(start, math.log(self.start))
        return {"theta": _theta(name, start), "log_v": pyro.param(f"log_v.{name}", begin)}

    def given(self, above: Above) -> Any:
        """The Normal."""
        theta = above["theta"]
        return dist.Normal(theta, (0.5 * above["log_v"]).exp()).to_event(theta.dim())

    def hyper(self, above: Above) -> Tensor:
        """Minus the log density of v, constants apart."""
        log_v = above["log_v"]
        return 0.5 * self.strength * (log_v + self.typical**2 * (-log_v).exp()).sum()

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """Theta <- the mean, v <- (V + strength typical^2) / (1 + strength)."""
        return {
            "theta": mean,
            "log_v": ((spread + self.strength * self.typical**2) / (1.0 + self.strength)).log(),
        }


@dataclass(frozen=True)
class InputConvex:
    """A learned penalty, convex in a client's tensor and theta together, as in the authors' later code.

        R = out . softplus(A w + B theta + b) + a/2 |w - theta|^2 + eps (|w|^2 + |theta|^2),    out = softplus(raw) > 0

    The middle keeps clients near theta, which is their weighted mean; what A, B, b and raw learn is by gradient steps of the server.

    Args:
        hidden: width. Default: our choice.
        pull: a. Default: the authors', as is eps.
        eps: keeps all of it strongly convex.
    """

    hidden: int = 8
    pull: float = 0.01
    eps: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse what is not positive."""
        _positive(hidden=self.hidden, pull=self.pull, eps=self.eps)

    def above(self, name: str, start: Tensor) -> Above:
        """Theta and the weights of the network, one for a tensor."""
        size, key = start.numel(), noise.fold(noise.root_key(0), noise.word(name))
        by = {"own": (self.hidden, size), "theirs": (self.hidden, size)}
        first = {
            part: pyro.param(
                f"convex_{part}.{name}",
                noise.normals(noise.fold(key, i), shape, start.dtype) / (2 * size) ** 0.5,
            )
            for i, (part, shape) in enumerate(by.items())
        }
        bias = pyro.param(f"convex_bias.{name}", torch.zeros(self.hidden, dtype=start.dtype))
        raw = pyro.param(f"convex_out.{name}", torch.full((self.hidden,), -4.0, dtype=start.dtype))
        return {"theta": _theta(name, start), **first, "bias": bias, "raw": raw}

    def given(self, above: Above) -> Penalised:
        """R, as it is."""
        theta = above["theta"]

        def penalty(w: Tensor) -> Tensor:
            inside = above["own"] @ w.flatten() + above["theirs"] @ theta.flatten() + above["bias"]
            near = 0.5 * self.pull * (w - theta).square().sum()
            return (
                softplus(above["raw"]) @ softplus(inside)
                + near
                + self.eps * (w.square().sum() + theta.square().sum())
            )

        return Penalised(theta, penalty)

    def hyper(self, above: Above) -> Tensor:
        """None."""
        return torch.zeros(())


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0.0:
            raise ValueError(f"{name} is {value}: it must be > 0")
