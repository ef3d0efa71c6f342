"""FedMAP's learned convex penalty: a network that is convex in a client's tensor and in theta."""

from __future__ import annotations

from dataclasses import dataclass

import pyro
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hierfl.core import noise
from hierfl.core.arguments import spelled
from hierfl.models.penalized import Above, Penalized, center_param

# of the raw weights out of the last layer and between layers: the penalty starts near |w - theta|^2
START = -4.0


@spelled
@dataclass(frozen=True)
class InputConvex:
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
        """Check that there is a layer, and that all numbers are > 0."""
        if not self.widths:
            raise ValueError("hidden is (): it must have one width or more")
        for name, value in (("pull", self.pull), ("eps", self.eps), ("hidden", min(self.widths))):
            if not value > 0.0:
                raise ValueError(f"{name} is {value}: it must be > 0")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        return (self.hidden,) if isinstance(self.hidden, int) else tuple(self.hidden)

    def above(self, name: str, start: Tensor) -> Above:
        """Declare theta and the weights of the penalty's network, one network per tensor."""
        size, key = start.numel(), noise.fold(noise.root_key(0), noise.word(name))
        dtype, widths, found = start.dtype, self.widths, {"theta": center_param(name, start)}

        def declared(part: str, value: Tensor) -> None:
            found[part] = pyro.param(f"convex_{part}.{name}", value)

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
        return found

    def given(self, above: Above) -> Penalized:
        """Return the whole of R."""
        theta = above["theta"]

        def penalty(w: Tensor) -> Tensor:
            found = torch.zeros(0)
            for layer in range(len(self.widths)):
                m = _mark(layer)
                inside = above[f"own{m}"] @ w.flatten() + above[f"theirs{m}"] @ theta.flatten()
                inside = inside + above[f"bias{m}"]
                if layer:
                    inside = inside + softplus(above[f"between{m}"]) @ found
                found = softplus(inside)
            pull = 0.5 * self.pull * (w - theta).square().sum()
            strongly = self.eps * (w.square().sum() + theta.square().sum())
            return softplus(above["out"]) @ found + pull + strongly

        return Penalized(theta, penalty)

    def hyper(self, above: Above) -> Tensor:
        """Return 0: R is all in the clients' prior."""
        return torch.zeros(())


def _mark(layer: int) -> str:
    """Return the suffix of the names of a layer's weights: none for the first."""
    return str(layer + 1) if layer else ""
