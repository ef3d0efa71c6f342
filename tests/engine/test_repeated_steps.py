"""Graphs of repeated steps: their results are those of eager steps, whatever is cut out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hierfl
from hierfl import methods, models
from hierfl.core import noise
from hierfl.core.normal_kernel import in_graph
from hierfl.core.trees import tree_leaves
from hierfl.engine.compiled import Graphs, Loop
from hierfl.engine.graph_inputs import MANY, cut_end
from hierfl.engine.graph_rewrites import draw_together
from hierfl.optimizers import SGD

aten = torch.ops.aten
WIDE = MANY // 2  # of two clients
State = dict[str, Tensor]


def move(work: State, x: Tensor) -> State:
    """Take a step of two clients on a penalty whose value is a large sum."""
    return {"w": work["w"] - 0.1 * (work["w"] - x), "loss": (work["w"] - x).square().sum(1)}


def smoothed(work: State, x: Tensor) -> State:
    """Take the same step; the value is a running mean, which the next step reads."""
    moved = move(work, x)
    return {**moved, "loss": 0.9 * work["loss"] + moved["loss"]}


def start(wide: int = WIDE) -> tuple[State, list[Tensor]]:
    xs = [torch.randn(2, wide) for _ in range(3)]
    return {"w": torch.randn(2, wide), "loss": torch.zeros(2)}, xs


def traced(step: Callable[[State, Tensor], State], wide: int = WIDE) -> Any:
    work, xs = start(wide)

    def flat(w: Tensor, loss: Tensor, x: Tensor) -> list[Tensor]:
        return list(step({"w": w, "loss": loss}, x).values())

    return make_fx(flat)(work["w"], work["loss"], xs[0])


@pytest.mark.parametrize("step", [move, smoothed])
def test_only_the_last_step_computes_a_large_sum_that_no_other_reads(
    step: Callable[[State, Tensor], State], not_lowered: None
) -> None:
    graph = traced(step)
    end = cut_end(graph, 2)
    assert (end is None) == (step is smoothed)
    sums = [node for node in graph.graph.nodes if node.target is aten.sum.dim_IntList]
    assert len(sums) == (0 if step is move else 1)
    eager, xs = start()
    loop = Loop(Graphs(), "step", step, {k: v.clone() for k, v in eager.items()})
    for k, x in enumerate(xs):
        eager = step(eager, x)
        loop.step(x, last=k == len(xs) - 1)
    torch.testing.assert_close(loop.value(), eager)


def test_every_step_has_all_results_unless_another_is_announced(not_lowered: None) -> None:
    eager, xs = start()
    loop = Loop(Graphs(), "step", move, {k: v.clone() for k, v in eager.items()})
    for x in xs:
        eager = move(eager, x)
        loop.step(x)
        torch.testing.assert_close(loop.value(), eager)


def test_a_small_sum_stays() -> None:
    assert cut_end(traced(move, wide=100), 2) is None


def test_ones_like_a_sum_read_its_shape_alone() -> None:
    """The gradient of a sum begins with ones of its shape, and takes no value."""

    def step(work: State, x: Tensor) -> State:
        def loss(w: Tensor) -> Tensor:
            return (w - x).square().sum(1)

        each, pull, *_ = torch.func.vjp(loss, work["w"])
        return {"w": work["w"] - 0.1 * pull(torch.ones_like(each))[0], "loss": each}

    graph = traced(step)
    assert cut_end(graph, 2) is not None
    assert not any(node.target is aten.sum.dim_IntList for node in graph.graph.nodes)
    work, xs = start()
    moved = graph(work["w"], work["loss"], xs[0], torch.zeros(2))[0]
    torch.testing.assert_close(moved, step(work, xs[0])["w"])


def test_normals_are_drawn_by_one_call() -> None:
    """The key of the second draw is made behind the first one."""
    keys = noise.client_keys(map(str, range(4)))

    def step(w: Tensor, keys: Tensor) -> Tensor:
        moved = w + noise.normals(noise.fold(keys, 1), (5,), torch.float32)
        return moved * noise.normals(noise.fold(keys, 2), (5,), torch.float32)

    w = torch.ones(4, 5, dtype=torch.float32)
    with in_graph():
        graph = make_fx(step)(w, keys)
    ops = torch.ops.hierfl
    calls = [node.target for node in graph.graph.nodes]
    assert calls.count(ops.normals.default) == 2
    draw_together(graph)
    calls = [node.target for node in graph.graph.nodes]
    assert calls.count(ops.normals.default) == 0 and calls.count(ops.normals_of.default) == 1
    torch.testing.assert_close(graph(w, keys), step(w, keys), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "off"),
    [(torch.float32, 2e-5), pytest.param(torch.float64, 1e-12, marks=pytest.mark.slow)],
)
def test_rounds_of_a_large_posterior_are_eager(
    dtype: torch.dtype, off: float, not_lowered: None
) -> None:
    """Noise by the kernel, the loss by the last step alone: the same fit to rounding.

    The KL of 19,000 weights is nearly 0, a sum of differences of about 1.
    """
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 3))
    model = models.bayesian_network(net, prior_scale="learned", scale_link="exp")
    method = methods.fedabml(
        model,
        hierfl.guides.mean_field(scale_link="exp"),
        optimizer=SGD(0.01),
        draws=1,
        steps=3,
        unit="step",
        batch_size=5,
    )
    data = hierfl.ClientData.from_arrays(
        torch.arange(60) % 4, x=torch.randn(60, 300), y=torch.arange(60) % 3
    )
    eager, compiled = (
        hierfl.fit(method, data, rounds=2, seed=3, settings=hierfl.Settings(compile=c))
        for c in (False, True)
    )
    for one, other in (
        (eager.message, compiled.message),
        (eager.progress.table, compiled.progress.table),
    ):
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
            torch.testing.assert_close(a, b, rtol=10.0 * off, atol=off)
    losses = compiled.history["loss"] - eager.history["loss"]
    assert float(losses.abs().max()) < 10.0 * off
