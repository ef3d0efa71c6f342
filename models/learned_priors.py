"""Learned priors of local weights, as in FedMAP; some of them are penalties and not densities.

Each is a frozen dataclass with three functions of one tensor: `above(name, start)` declares the
global params, `given(above)` returns the prior of a client's local tensor, and `hyper(above)` is a
penalty on the global params themselves. With a closed form, `best(gamma, mean, spread)` returns the
best global params, given the mean and variance of the clients' tensors.
"""

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
from hierfl.core.arguments import expect, spelled

__all__ = [
    "InputConvex",
    "Isotropic",
    "LearnedNormal",
    "LearnedPrior",
    "LearnedVariance",
    "Penalized",
]
Above = dict[str, Tensor]
# of the raw weights out of the last layer and between layers: the penalty starts near |w - theta|^2
START = -4.0
POSITIVE = "(0, inf)"


class LearnedPrior(Protocol):
    """A prior of the clients' local tensors, with global params that are learned."""

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta and other global params of a tensor that starts at `start`."""

    def given(self, above: Above) -> Any:
        """Return the prior of a local tensor, of event shape `theta.shape` and mean theta."""

    def hyper(self, above: Above) -> Tensor:
        """Return the penalty on the global params themselves, (): 0 unless a prior has one."""
        return torch.zeros(())


@spelled
@dataclass(frozen=True)
class Isotropic(LearnedPrior):
    """A Normal prior of known variance, up to its constant.

        w_k ~ Normal(theta, variance),    penalty |w_k - theta|^2 / (2 variance)

    Args:
        variance: sigma^2 > 0. Default: that of the authors' released configuration.

    Raises:
        ValueError: `variance` is not > 0.

    Reference: Eq. (6) and (7) of FedMAP.
    """

    variance: float = 15.0

    def __post_init__(self) -> None:
        expect(variance=(self.variance, "(0, inf]"))

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta."""
        return {"theta": center_param(name, start)}

    def given(self, above: Above) -> "Penalized":
        """Return the penalty about theta."""
        theta = above["theta"]
        return Penalized(theta, lambda w: (w - theta).square().sum() / (2.0 * self.variance))

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """Return the best theta, the mean of the clients' tensors."""
        return {"theta": mean}


@spelled
@dataclass(frozen=True)
class LearnedVariance:
    """A penalty with a learned precision for each weight, as in the paper.

        R = sum_j alpha(s_j)/2 (w_j - theta_j)^2 + eps (s_j^2 + theta_j^2)
        alpha(s) = 1 / (s + c),    s > -c

    R lacks the normalizer of a Normal, so it is no density and s is not a variance. At the optimum
    s (s + c)^2 = V / (4 eps), with V the variance of the clients' weights about theta, so that eps
    determines s. For a prior that learns a variance use `LearnedNormal`.

    Args:
        c: > 0. Default: that of A.4 of the paper.
        eps: > 0. Default: that of A.4 of the paper.

    Raises:
        ValueError: `c` or `eps` is not > 0.

    Reference: A.2, Eq. (18) and Lemma 1 of FedMAP.
    """

    c: float = 1.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        expect(c=(self.c, POSITIVE), eps=(self.eps, POSITIVE))

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta, and s, which starts at 0."""
        s = pyro.param(f"s.{name}", torch.zeros_like(start))
        return {"theta": center_param(name, start), "s": s}

    def alpha(self, s: Tensor) -> Tensor:
        """Return the precision of each weight, with s clamped above -c, where it is infinite."""
        return 1.0 / (s.clamp(min=-0.999 * self.c) + self.c)

    def given(self, above: Above) -> "Penalized":
        """Return the part of R that depends on a client's weights."""
        theta, precision = above["theta"], self.alpha(above["s"])
        return Penalized(theta, lambda w: (precision * (w - theta).square()).sum() / 2.0)

    def hyper(self, above: Above) -> Tensor:
        """Return the part of R that depends on the global params alone."""
        return self.eps * (above["theta"].square().sum() + above["s"].square().sum())

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """Return the best theta at the given s, and then the best s at that theta; both are exact.

        theta = alpha mean / (alpha + 2 eps), s (s + c)^2 = V / (4 eps) with s > 0
        """
        alpha = self.alpha(gamma["s"])
        theta = alpha * mean / (alpha + 2.0 * self.eps)
        target = (spread + (mean - theta).square()) / (4.0 * self.eps)
        s = target ** (1.0 / 3.0)  # above the root: from there Newton's steps decrease to it
        for _ in range(60):
            s = s - (s * (s + self.c).square() - target) / ((s + self.c) * (3.0 * s + self.c))
        return {"theta": theta, "s": s}


@spelled
@dataclass(frozen=True)
class LearnedNormal:
    """A Normal prior with a learned variance for each weight, normalizer included: empirical Bayes.

        w_k ~ Normal(theta, v)

    The joint mode in (w, v) is degenerate: v is 0 and all clients are equal. Therefore v has a
    scaled inverse chi-squared hyper-prior. It acts like additional clients at the distance
    `typical` from theta, with the total weight `strength`, where the weights of the actual clients
    sum to 1.

    Args:
        start: v before the first round, > 0.
        strength: strength of the hyper-prior, > 0; 1 is as strong as all clients together.
        typical: the distance from theta that the hyper-prior expects, a standard deviation > 0.

    Raises:
        ValueError: one of the three is not > 0.
    """

    start: float = 0.01
    strength: float = 0.5
    typical: float = 0.1

    def __post_init__(self) -> None:
        expect(
            start=(self.start, POSITIVE),
            strength=(self.strength, POSITIVE),
            typical=(self.typical, POSITIVE),
        )

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta and log v."""
        begin = torch.full_like(start, math.log(self.start))
        return {"theta": center_param(name, start), "log_v": pyro.param(f"log_v.{name}", begin)}

    def given(self, above: Above) -> Any:
        """Return Normal(theta, v)."""
        theta = above["theta"]
        return dist.Normal(theta, (0.5 * above["log_v"]).exp()).to_event(theta.dim())

    def hyper(self, above: Above) -> Tensor:
        """Return minus the log density of v, without its constants."""
        log_v = above["log_v"]
        return 0.5 * self.strength * (log_v + self.typical**2 * (-log_v).exp()).sum()

    def best(self, gamma: Above, mean: Tensor, spread: Tensor) -> Above:
        """Return theta = mean, and log v, v = (V + strength typical^2) / (1 + strength)."""
        return {
            "theta": mean,
            "log_v": ((spread + self.strength * self.typical**2) / (1.0 + self.strength)).log(),
        }


@spelled
class Penalized(TorchDistribution):
    """A tensor with the unnormalized density exp(-penalty(w)).

    It is for point estimates (guide `delta`), not for draws.

    Args:
        center: (*event), where guides start.
        penalty: a smooth function w (*event) -> ().
        batch_shape: shape of the plates around it.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's own form)

    def __init__(
        self, center: Tensor, penalty: Callable[[Tensor], Tensor], batch_shape: tuple[int, ...] = ()
    ) -> None:
        self.center, self.penalty = center, penalty
        super().__init__(torch.Size(batch_shape), center.shape, validate_args=False)

    @property
    def support(self) -> Any:
        """All real tensors."""
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """The center."""
        return self.center.expand(self.batch_shape + self.event_shape)

    def expand(self, batch_shape: Any, _instance: object = None) -> "Penalized":
        """Return the same distribution with another batch shape."""
        return Penalized(self.center, self.penalty, tuple(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return minus the penalty of each tensor, (*batch)."""
        events = value.reshape(-1, *self.event_shape)
        lead = value.shape[: value.dim() - len(self.event_shape)]
        log_density = (
            torch.stack([-self.penalty(v) for v in events.unbind(0)])
            if len(events) > 1
            else -self.penalty(events[0])[None]
        )
        return log_density.reshape(lead).expand(torch.broadcast_shapes(lead, self.batch_shape))


def center_param(name: str, start: Tensor) -> Tensor:
    """Declare the global param theta, which starts at the module's values."""
    return pyro.param(f"theta.{name}", start.clone)


@spelled
@dataclass(frozen=True)
class InputConvex(LearnedPrior):
    """A learned penalty, jointly convex in a client's tensor and theta: the authors' later code.

        R = out . z_L + a/2 |w - theta|^2 + eps (|w|^2 + |theta|^2),    out = softplus(raw) > 0
        z_1 = softplus(A_1 w + B_1 theta + b_1)
        z_l = softplus(softplus(C_l) z_(l-1) + A_l w + B_l theta + b_l),    l = 2..L

    The second term keeps clients near theta, which is their weighted mean. The server learns A, B,
    b, C and raw by gradient steps. softplus(C) > 0 keeps deeper networks convex (Amos et al. 2017,
    arXiv:1609.07152).

    Args:
        hidden: width of each hidden layer z_l, > 0; an int is one layer. Default: our choice.
        pull: a > 0. Default: the authors'.
        eps: > 0; it makes R strongly convex. Default: the authors'.

    Raises:
        ValueError: one of the three is not > 0, or there is no layer.
    """

    hidden: int | tuple[int, ...] = 8
    pull: float = 0.01
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("hidden is (): it must have one width or more")
        expect(
            pull=(self.pull, POSITIVE),
            eps=(self.eps, POSITIVE),
            hidden=(min(self.widths), "[1, inf)"),
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        return tuple(self.hidden) if isinstance(self.hidden, tuple | list) else (self.hidden,)

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta and the weights of the penalty's network, one network per tensor."""
        size, key = start.numel(), noise.fold(noise.root_key(0), noise.word(name))
        dtype, widths, params = start.dtype, self.widths, {"theta": center_param(name, start)}

        def declared(part: str, value: Tensor) -> None:
            params[part] = pyro.param(f"convex_{part}.{name}", value)

        for layer, width in enumerate(widths):
            mark = _mark(layer)
            for place, of in enumerate(("own", "theirs")):
                drawn = noise.normals(noise.fold(key, 2 * layer + place), (width, size), dtype)
                declared(of + mark, drawn / (2 * size) ** 0.5)
            declared(f"bias{mark}", torch.zeros(width, dtype=dtype))
            if layer:
                declared(
                    f"between{mark}", torch.full((width, widths[layer - 1]), START, dtype=dtype)
                )
        declared("out", torch.full((widths[-1],), START, dtype=dtype))
        return params

    def given(self, above: Above) -> Penalized:
        """Return the whole of R."""
        theta = above["theta"]

        def penalty(w: Tensor) -> Tensor:
            z = torch.zeros(0)
            for layer in range(len(self.widths)):
                m = _mark(layer)
                inside = above[f"own{m}"] @ w.flatten() + above[f"theirs{m}"] @ theta.flatten()
                inside = inside + above[f"bias{m}"]
                if layer:
                    inside = inside + softplus(above[f"between{m}"]) @ z
                z = softplus(inside)
            pull = 0.5 * self.pull * (w - theta).square().sum()
            strongly = self.eps * (w.square().sum() + theta.square().sum())
            return softplus(above["out"]) @ z + pull + strongly

        return Penalized(theta, penalty)


def _mark(layer: int) -> str:
    return str(layer + 1) if layer else ""
