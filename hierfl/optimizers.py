"""Optimizers as pure functions of trees; SGD and Adam are here as torchopt's do not run under vmap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hierfl.core.arguments import spelled
from hierfl.core.trees import Tree, named_leaves, tree_map, with_leaves, zeros_like

__all__ = ["SGD", "Adam", "Optimizer", "Stepped", "TorchOptimizer", "step"]


class Optimizer(Protocol):
    """`init(params) -> state`, and `update(gradients, state, params=) -> (what to add, state)`."""

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """Return what to add to the params, and the next state; torchopt's `inplace` is always False."""


@spelled
@dataclass(frozen=True)
class SGD:
    """Gradient descent: v <- momentum v + g, params <- params - lr v, as torch.optim.SGD.

    Args:
        lr: step size, > 0.
        momentum: in [0, 1); heavy-ball momentum without dampening, as in torch.optim.SGD.
    """

    lr: float
    momentum: float = 0.0

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        return {"velocity": zeros_like(params)} if self.momentum else {}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """Return what to add to the params, and the next state."""
        if not self.momentum:
            return tree_map(lambda g: -self.lr * g, updates), state
        velocity = tree_map(lambda v, g: self.momentum * v + g, state["velocity"], updates)
        return tree_map(lambda v: -self.lr * v, velocity), {"velocity": velocity}


@spelled
@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, Algorithm 1), or AdamW with `weight_decay`.

    AdamW is Algorithm 2 of Loshchilov and Hutter 2019.

    Args:
        lr: step size, > 0.
        betas: decay rates of the two moments, in [0, 1); the default is the paper's.
        eps: added to the square root of the second moment; the default is the paper's.
        weight_decay: of the decoupled decay, params <- params - lr weight_decay params; 0: none.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        return {"first": zeros_like(params), "second": zeros_like(params), "steps": torch.zeros(())}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """Return what to add to the params, which `weight_decay` needs, and the next state."""
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


@spelled
@dataclass(frozen=True)
class TorchOptimizer:
    """A `torch.optim` optimizer as functions: `TorchOptimizer(torch.optim.NAdam, {"lr": 0.1})`.

    It is for the server. A client's step needs SGD, Adam or a torchopt transformation, because the
    optimizers of torch.optim count their steps on the host, which vmap does not allow.

    Args:
        kind: class of the optimizer.
        options: its keyword arguments.
    """

    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def init(self, params: Tree) -> Tree:
        """Return a state of zeros before the first step; only its shapes matter."""
        _, state = self._step(params, zeros_like(params), None)
        return {"begun": torch.zeros(()), "of": zeros_like(state)}

    def update(
        self, updates: Tree, state: Tree, *, params: Tree | None = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        """Return what to add to the params, which are needed, and the next state."""
        if params is None:
            raise ValueError("TorchOptimizer.update needs the params: pass params=")
        moved, memory = self._step(params, updates, state["of"] if bool(state["begun"]) else None)
        return moved, {"begun": torch.ones(()), "of": memory}

    def _step(self, params: Tree, gradients: Tree, state: Tree | None) -> tuple[Tree, Tree]:
        """Take a new torch optimizer's step from a state (None: the first); return what to add, and tensors by leaf."""
        names, leaves = zip(*named_leaves(params).items(), strict=True)
        moving = [torch.nn.Parameter(leaf.detach().clone()) for leaf in leaves]
        optimizer = self.kind(moving, **self.options)
        if state is not None:
            loaded = optimizer.state_dict()
            loaded["state"] = {
                i: {k: v.clone() for k, v in own.items()} for i, own in enumerate(state)
            }
            optimizer.load_state_dict(loaded)
        for leaf, gradient in zip(moving, named_leaves(gradients).values(), strict=True):
            leaf.grad = gradient.detach().clone()
        optimizer.step()
        memory = [
            {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
            for p in moving
        ]
        moved = {n: (p.detach() - leaf) for n, p, leaf in zip(names, moving, leaves, strict=True)}
        return with_leaves(params, moved), memory


def plain_lr(optimizer: Optimizer, option: str, why: str) -> float:
    """Return the step size of plain SGD, all that the method's equations hold for; `why` is for the message."""
    if not isinstance(optimizer, SGD) or optimizer.momentum:
        raise ValueError(f"{option} is {optimizer}: it must be SGD(lr) without momentum, as {why}")
    if not optimizer.lr >= 0.0:
        raise ValueError(f"{option} is {optimizer}: its step size must be 0 or more")
    return optimizer.lr


class Stepped(NamedTuple):
    """Params and the state of their optimizer."""

    params: Tree
    state: Tree


def step(optimizer: Optimizer, gradient: Tree, at: Stepped, rate: float | Tensor = 1.0) -> Stepped:
    """Take one step of an optimizer; `rate`, in [0, 1], is a factor such as that of a schedule."""
    if not at.params:
        return at
    move, state = optimizer.update(gradient, at.state, params=at.params, inplace=False)
    # A rate of 1 is not multiplied in: the compiler then sees params + scalar * gradient, and fuses
    # the step into the product.
    full = isinstance(rate, float) and rate == 1.0
    return Stepped(tree_map(lambda p, u: p + (u if full else rate * u), at.params, move), state)
