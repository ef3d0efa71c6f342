"""Optimisers as pure functions of trees: they run in a client's step, under `torch.vmap`, in a graph, and on the server.

`torchopt`'s transformations have the same two functions and may be handed in anywhere an optimiser is asked for. Ours are here
because torchopt's update in place (`addcmul_`), which vmap can only run one client at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hierfl.core.trees import Tree, named_leaves, tree_map, with_leaves, zeros_like

__all__ = ["SGD", "Adam", "Optimiser", "Stepped", "TorchOptimiser", "step"]


class Optimiser(Protocol):
    """`init(params) -> state` and `update(gradients, state, params=) -> (what to add to the params, state)`."""

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """What to add to the params, and the next state."""


@dataclass(frozen=True)
class SGD:
    """Gradient descent: v <- momentum v + g; params <- params - lr v, with v = g where momentum is 0.

    Args:
        lr: step size, > 0.
        momentum: in [0, 1); heavy ball, undamped, as torch.optim.SGD.
    """

    lr: float
    momentum: float = 0.0

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        return {"velocity": zeros_like(params)} if self.momentum else {}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """What to add to the params, and the next state."""
        if not self.momentum:
            return tree_map(lambda g: -self.lr * g, updates), state
        velocity = tree_map(lambda v, g: self.momentum * v + g, state["velocity"], updates)
        return tree_map(lambda v: -self.lr * v, velocity), {"velocity": velocity}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, Algorithm 1), or AdamW with `weight_decay` (Loshchilov and Hutter 2019, Algorithm 2).

    Args:
        lr: step size, > 0.
        betas: decay of the two moments; the defaults are the paper's.
        eps: added to the root of the second moment.
        weight_decay: decoupled, params <- params - lr weight_decay params.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        return {"first": zeros_like(params), "second": zeros_like(params), "steps": torch.zeros(())}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """What to add to the params, and the next state."""
        b1, b2 = self.betas
        steps = state["steps"] + 1
        first = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state["first"], updates)
        second = tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state["second"], updates)
        rate, root = self.lr / (1 - b1**steps), torch.sqrt(1 - b2**steps)
        move = tree_map(lambda m, v: -rate * m / (v.sqrt() / root + self.eps), first, second)
        if self.weight_decay:
            if params is None:
                raise ValueError("weight_decay needs the params: pass params=")
            move = tree_map(lambda u, p: u - self.lr * self.weight_decay * p, move, params)
        return move, {"first": first, "second": second, "steps": steps}


@dataclass(frozen=True)
class TorchOptimiser:
    """Any `torch.optim` optimiser as a pure function, for the server: `TorchOptimiser(torch.optim.NAdam, {"lr": 0.01})`.

    A client's step needs SGD, Adam or a torchopt transformation: torch.optim's count steps on the host, which vmap refuses.
    """

    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def init(self, params: Tree) -> Tree:
        """The state before the first step, of which only shapes count: what it starts from, torch's optimiser knows itself."""
        _, state = self._step(params, zeros_like(params), None)
        return {"begun": torch.zeros(()), "of": zeros_like(state)}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """What to add to the params, and the next state."""
        if params is None:
            raise ValueError("a torch optimiser needs the params: pass params=")
        moved, kept = self._step(params, updates, state["of"] if bool(state["begun"]) else None)
        return moved, {"begun": torch.ones(()), "of": kept}

    def _step(self, params: Tree, gradients: Tree, state: Tree | None) -> tuple[Tree, Tree]:
        names, leaves = zip(*named_leaves(params).items(), strict=True)
        moving = [torch.nn.Parameter(leaf.detach().clone()) for leaf in leaves]
        optimiser = self.kind(moving, **self.options)
        if state is not None:
            loaded = optimiser.state_dict()
            loaded["state"] = {
                i: {k: v.clone() for k, v in own.items()} for i, own in enumerate(state)
            }
            optimiser.load_state_dict(loaded)
        for leaf, gradient in zip(moving, named_leaves(gradients).values(), strict=True):
            leaf.grad = gradient.detach().clone()
        optimiser.step()
        kept = [
            {k: v for k, v in optimiser.state.get(p, {}).items() if isinstance(v, Tensor)}
            for p in moving
        ]
        moved = {n: (p.detach() - leaf) for n, p, leaf in zip(names, moving, leaves, strict=True)}
        return with_leaves(params, moved), kept


class Stepped(NamedTuple):
    """Params and the state of their optimiser."""

    params: Tree
    state: Tree


def step(optimiser: Optimiser, gradient: Tree, at: Stepped, rate: float | Tensor = 1.0) -> Stepped:
    """One step, `rate` times as long as the optimiser's own (1 leaves it as it is).

    Args:
        optimiser: SGD, Adam, a torchopt transformation; on the server any torch optimiser.
        gradient: of the loss, of the params' shapes.
        at: where it starts.
        rate: of a schedule, in [0, 1].
    """
    if not at.params:
        return at
    move, state = optimiser.update(gradient, at.state, params=at.params, inplace=False)
    # times 1 is left out: a compiler then sees params + number * gradient, and lets the step ride on the product
    full = isinstance(rate, float) and rate == 1.0
    return Stepped(tree_map(lambda p, u: p + (u if full else rate * u), at.params, move), state)
