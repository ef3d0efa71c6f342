"""Optimizers agree with torch.optim step by step, run under vmap, and wrap the optimizers
of torch.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl.optimizers import SGD, Adam, Stepped, TorchOptimizer, step

KINDS: dict[str, tuple[Any, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (SGD(0.1, 0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (Adam(0.1), torch.optim.Adam, {"lr": 0.1}),
    "adam, betas": (
        Adam(0.1, (0.5, 0.7), 1e-3),
        torch.optim.Adam,
        {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3},
    ),
    "adamw": (Adam(0.1, weight_decay=0.2), torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
    "wrapped sgd": (
        TorchOptimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.5},
    ),
    "wrapped adam": (TorchOptimizer(torch.optim.Adam, {"lr": 0.1}), torch.optim.Adam, {"lr": 0.1}),
    "wrapped nadam": (
        TorchOptimizer(torch.optim.NAdam, {"lr": 0.1}),
        torch.optim.NAdam,
        {"lr": 0.1},
    ),
    "wrapped adagrad": (
        TorchOptimizer(torch.optim.Adagrad, {"lr": 0.1}),
        torch.optim.Adagrad,
        {"lr": 0.1},
    ),
    "wrapped rprop": (
        TorchOptimizer(torch.optim.Rprop, {"lr": 0.1}),
        torch.optim.Rprop,
        {"lr": 0.1},
    ),
    "wrapped rmsprop": (
        TorchOptimizer(torch.optim.RMSprop, {"lr": 0.1}),
        torch.optim.RMSprop,
        {"lr": 0.1},
    ),
}


def gradients(n: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {"a": torch.randn(3, generator=g), "b": torch.randn(2, 2, generator=g)} for _ in range(n)
    ]


@pytest.mark.parametrize("name", KINDS)
def test_steps_agree_with_torch_optim(name: str) -> None:
    ours, theirs, options = KINDS[name]
    start = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    at = Stepped(start, ours.init(start))
    moving = [torch.nn.Parameter(v.clone()) for v in start.values()]
    optimizer: Any = theirs(moving, **options)
    for gradient in gradients(6):
        at = step(ours, gradient, at)
        for leaf, g in zip(moving, gradient.values(), strict=True):
            leaf.grad = g
        optimizer.step()
        for leaf, value in zip(moving, at.params.values(), strict=True):
            assert torch.allclose(leaf, value, rtol=1e-12, atol=1e-14)
    assert torch.equal(start["a"], torch.ones(3)), "the params passed in are not changed"


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_slots_under_vmap_are_independent(name: str) -> None:
    ours = KINDS[name][0]
    start = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2, 2, 2)}
    stacked = [{k: torch.stack([v, 2 * v]) for k, v in g.items()} for g in gradients(4)]
    at = Stepped(start, torch.vmap(ours.init)(start))
    for gradient in stacked:
        at = torch.vmap(lambda g, p, s: step(ours, g, Stepped(p, s)))(gradient, at.params, at.state)
    for k in range(2):
        alone = Stepped(
            {n: v[k] for n, v in start.items()}, ours.init({n: v[k] for n, v in start.items()})
        )
        for gradient in stacked:
            alone = step(ours, {n: v[k] for n, v in gradient.items()}, alone)
        assert all(torch.allclose(at.params[n][k], v, atol=1e-14) for n, v in alone.params.items())


@pytest.mark.parametrize("name", KINDS)
def test_rate_scales_the_step(name: str) -> None:
    ours = KINDS[name][0]
    start = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    (gradient,) = gradients(1)
    moved = {}
    for rate in (0.0, 0.5, 1.0, torch.tensor(1.0)):
        after = step(ours, gradient, Stepped(start, ours.init(start)), rate).params
        moved[float(rate)] = after["a"] - start["a"]
    assert torch.equal(moved[0.0], torch.zeros(3))
    assert torch.allclose(moved[0.5], 0.5 * moved[1.0])


def test_empty_params_are_left_alone_and_missing_params_raise() -> None:
    assert step(Adam(0.1), {}, Stepped({}, {})) == Stepped({}, {})
    with pytest.raises(ValueError, match="weight_decay needs the params"):
        Adam(0.1, weight_decay=0.1).update(
            {"a": torch.ones(1)}, Adam(0.1).init({"a": torch.ones(1)})
        )
    with pytest.raises(ValueError, match=r"TorchOptimizer\.update needs the params"):
        TorchOptimizer(torch.optim.SGD, {"lr": 0.1}).update({"a": torch.ones(1)}, [])
