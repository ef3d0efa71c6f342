"""Compiled steps: the numbers and the noise of eager steps, which no graph rewrite changes."""

import warnings
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hierfl
from hierfl import guides
from hierfl.core.add_to_row import add_to_row
from hierfl.core.trees import tree_leaves
from hierfl.engine import compiled as graph
from hierfl.engine import graph_rewrites as passes
from hierfl.engine import worth_compiling as worth
from hierfl.engine.federation import federate
from tests.engine.stepped import stepped


def rows(seed: int = 0) -> hierfl.ClientData:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(90, 4, generator=g)
    return hierfl.ClientData.from_arrays(
        torch.arange(90) % 7, x=x, y=(x.sum(1) > 0).to(x.dtype), label=torch.arange(90) % 3
    )


def hierarchy(batch: hierfl.ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


def apart(a: Any, b: Any) -> float:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return max((float((u - v).abs().max()) for u, v in pairs if u.numel()), default=0.0)


@pytest.mark.slow
def test_priors_made_outside_the_program_are_compiled_too(not_lowered: None) -> None:
    """They check their values, which a trace does not have."""
    level, spread = dist.Normal(torch.zeros(4), 1.0).to_event(1), dist.LogNormal(0.0, 1.0)

    def model(batch: hierfl.ClientBatch) -> None:
        mu, tau = pyro.sample("mu", level), pyro.sample("tau", spread)
        with batch.clients():
            w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
            with batch.data():
                pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)

    method = hierfl.methods.fedsvi(model, guides.mean_field)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = hierfl.Settings(compile=True)
        fit = hierfl.fit(method, rows(), rounds=1, settings=compiled, progress=False)
    assert fit.progress.compiled
    with pytest.raises(ValueError, match="support"):
        spread.log_prob(torch.tensor(-1.0))


def compiles(method: Any, seconds: float, monkeypatch: pytest.MonkeyPatch, **how: Any) -> bool:
    """Return whether "auto" would compile a method whose every eager step took so many seconds."""
    monkeypatch.setattr(worth, "_seconds", lambda *of_phase: seconds)
    federation = federate(method, rows(), seed=0)
    rounds, most = how.get("rounds", 60), method.most_rounds
    return federation.may_compile and worth.worth_compiling(federation, rounds, most)


def test_auto_counts_the_rounds_that_are_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4 s a step 60 rounds repay compiling, and the dozen that a self-stopping method takes do not."""
    method = hierfl.methods.fedsvi(hierarchy, guides.mean_field)
    assert compiles(method, 2.0, monkeypatch)
    assert not compiles(replace(method, most_rounds=100), 0.7, monkeypatch)
    assert compiles(replace(method, most_rounds=100), 2.0, monkeypatch)
    assert not compiles(replace(method, most_rounds=1), 2.0, monkeypatch)


def test_auto_begins_no_trace_of_nested_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """fedlaplace says that its steps nest derivatives; those of others are counted, operation by operation."""
    assert not compiles(hierfl.methods.fedlaplace(hierarchy), 1000.0, monkeypatch)
    method = hierfl.methods.fedsvi(hierarchy, guides.mean_field)
    assert compiles(method, 2.0, monkeypatch)
    monkeypatch.setattr(worth, "OPERATION_SECONDS", 1.0)  # hundreds of operations
    assert not compiles(method, 2.0, monkeypatch)
    monkeypatch.undo()
    assert worth.OPERATION_SECONDS * 3000 < worth.COMPILING_SECONDS  # most methods: as before


@pytest.mark.slow("0.0")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_compiled_is_eager_on_ragged_mini_batches(momentum: float, not_lowered: None) -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net = hierfl.models.network(layers, y="label")
    sgd = hierfl.optimizers.SGD(0.1, momentum=momentum)
    method = hierfl.methods.fedavg(net, optimizer=sgd, steps=2, unit="epoch", batch_size=4)
    eager, compiled = (
        hierfl.fit(method, rows(), rounds=3, settings=hierfl.Settings(compile=c))
        for c in (False, True)
    )
    assert apart(eager.message, compiled.message) < 1e-12


def test_a_tensor_that_comes_in_twice_is_two_inputs() -> None:
    """make_fx silently takes it for one input; a working state may start as the message itself."""
    a, b = torch.ones(3), 2.0 * torch.ones(3)
    graphs = graph.Graphs()
    assert stepped(graphs, lambda u, v: u + 10.0 * v, a, a).tolist() == [11.0] * 3
    assert stepped(graphs, lambda u, v: u + 10.0 * v, a, b).tolist() == [21.0] * 3
    assert len(graphs.made) == 1


def test_what_cannot_be_traced_runs_eagerly_with_one_warning() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1.0 if bool(x.sum() > 0) else x - 1.0

    graphs = graph.Graphs()
    with pytest.warns(UserWarning, match="runs eagerly"):
        assert stepped(graphs, step, torch.ones(2)).tolist() == [2.0, 2.0]
    assert stepped(graphs, step, -torch.ones(2)).tolist() == [-2.0, -2.0]


def gradient_step(w: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """A step of a dense layer, whose gradient comes transposed twice."""
    product = torch.bmm(g.transpose(1, 2), x)
    return w - 0.01 * product.transpose(1, 2).transpose(1, 2)


def called(found: fx.GraphModule, op: object) -> int:
    return sum(node.target is op for node in found.graph.nodes)


def test_the_passes_keep_the_numbers_and_write_no_gradient() -> None:
    inputs = torch.randn(3, 5, 7), torch.randn(3, 4, 7), torch.randn(3, 4, 5)
    traced = make_fx(gradient_step)(*inputs)
    passes.rewrite(traced)
    torch.testing.assert_close(traced(*inputs), gradient_step(*inputs))
    assert called(traced, passes.add_product) == 1
    assert (
        called(traced, torch.ops.aten.bmm.default) == called(traced, torch.ops.aten.mul.Tensor) == 0
    )


def to_a_row(sums: Tensor, weights: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of three clients, each of which adds its weights to a row of its own sums."""
    return torch.vmap(add_to_row)(sums, weights - x, at), weights - x


@pytest.mark.parametrize("given", [0, 1])
def test_adding_to_a_row_writes_that_row_alone(given: int) -> None:
    sums, weights, x = torch.randn(3, 4, 5), torch.randn(3, 5), torch.randn(3, 5)
    at = torch.tensor([2.0, 4.0, 0.0])  # the second client has no such row
    traced = make_fx(to_a_row)(sums, weights, x, at)
    passes.rewrite(traced, given)
    assert called(traced, passes.add_to_row_) == given
    expected = sums.clone()
    expected[0, 2] += (weights - x)[0]
    expected[2, 0] += (weights - x)[2]
    before = sums.clone()
    for found in (to_a_row(sums, weights, x, at)[0], traced(sums, weights, x, at)[0]):
        torch.testing.assert_close(found, expected)
    assert torch.equal(sums, expected if given else before)


def test_sums_that_are_read_again_are_not_overwritten() -> None:
    inputs = torch.randn(3, 4, 5), torch.randn(3, 5), torch.tensor([0.0, 1.0, -1.0])

    def read_again(sums: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return torch.vmap(add_to_row)(sums, x, at), sums.sum(1)

    traced = make_fx(read_again)(*inputs)
    passes.rewrite(traced, 1)
    assert called(traced, passes.add_to_row_) == 0


def test_the_gradient_of_the_only_entry_of_a_dimension_is_a_view() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:  # as the weight of a slot, in a plate of one client
        return w - 0.1 * torch.func.grad(lambda w: (torch.bmm(x, w[:, 0]).square()).sum())(w)

    inputs = torch.randn(3, 1, 5, 7), torch.randn(3, 4, 5)
    traced = make_fx(step)(*inputs)
    passes.rewrite(traced)
    assert called(traced, torch.ops.aten.select_backward.default) == 0
    assert called(traced, passes.add_product) == 1
    torch.testing.assert_close(traced(*inputs), step(*inputs))


def test_a_gradient_that_is_used_twice_is_left_alone() -> None:
    def step(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.bmm(a, b)
        return w - 0.1 * product, product.square().sum()

    inputs = torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    traced = make_fx(step)(*inputs)
    passes.rewrite(traced)
    assert called(traced, passes.add_product) == 0
    for found, wanted in zip(traced(*inputs), step(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_products_and_sums_that_change_something_stay() -> None:
    def typed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        last = (b + 0.0).log() + (a * b.exp()).abs().log()
        return a * 1.0, a + 0, a.float() * 1, torch.add(a, b, alpha=2), b * 1, last

    inputs = torch.arange(1, 4), torch.rand(3) + 0.1
    traced = make_fx(typed)(*inputs)
    passes.rewrite(traced)
    for found, wanted in zip(traced(*inputs), typed(*inputs), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)
    assert called(traced, torch.ops.aten.log.default) == 2


def test_auto_compiles_a_long_run_only() -> None:
    method = hierfl.methods.fedsvi(hierarchy, guides.delta)
    assert not hierfl.fit(method, rows(), rounds=2).progress.compiled
    with pytest.raises(ValueError, match="compile is 'yes'"):
        hierfl.fit(method, rows(), rounds=2, settings=hierfl.Settings(compile="yes"))  # type: ignore[arg-type]


def test_a_graph_made_before_is_read_from_disk() -> None:
    counted = torch._dynamo.utils.counters["aot_autograd"]
    inputs = torch.randn(3, 5, 7), torch.randn(3, 4, 7), torch.randn(3, 4, 5)
    stepped(graph.Graphs(), gradient_step, *inputs)
    before = counted["autograd_cache_hit"]
    stepped(graph.Graphs(), gradient_step, *inputs)
    assert counted["autograd_cache_hit"] == before + 1


def on_two_halves(w: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return w - 0.1 * (torch.bmm(a, b) + 2.0 * torch.bmm(c, d))


def test_all_products_of_a_gradient_are_added_in_place() -> None:
    shapes = ((3, 5, 7), (3, 5, 4), (3, 4, 7), (3, 5, 2), (3, 2, 7))
    inputs = [torch.randn(shape) for shape in shapes]
    wanted = on_two_halves(*inputs)
    traced = make_fx(on_two_halves)(*inputs)
    passes.rewrite(traced, 1)
    assert called(traced, passes.add_product) == 2
    assert called(traced, torch.ops.aten.bmm.default) == 0
    moved = stepped(graph.Graphs(), on_two_halves, *inputs)
    torch.testing.assert_close(moved, wanted)
    assert moved.data_ptr() == inputs[0].data_ptr()


def test_only_given_tensors_are_overwritten() -> None:
    w, x, g = torch.randn(3, 5, 7), torch.randn(3, 4, 7), torch.randn(3, 4, 5)
    wanted, kept = gradient_step(w, x, g), (x.clone(), g.clone())
    moved = stepped(graph.Graphs(), gradient_step, w, x, g)
    torch.testing.assert_close(moved, wanted)
    assert moved.data_ptr() == w.data_ptr()
    assert torch.equal(x, kept[0]) and torch.equal(g, kept[1]), "they may not be overwritten"


def test_a_given_tensor_that_another_input_shares_is_copied_first() -> None:
    w, g = torch.randn(3, 4, 7), torch.randn(3, 4, 4)
    kept, wanted = w.clone(), gradient_step(w, w, g)
    moved = stepped(graph.Graphs(), gradient_step, w, w, g)
    torch.testing.assert_close(moved, wanted)
    assert torch.equal(w, kept)


def both_uses(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    moved = w - 0.1 * torch.bmm(a, b)
    return moved, w.transpose(1, 2)


def chained(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two steps in one graph, the second through a decayed weight; and the weight times itself."""
    first = 0.9 * w - 0.1 * torch.bmm(a, b)
    second = 0.9 * first - 0.1 * torch.bmm(a, b + first.sum(1, keepdim=True))
    return second, torch.bmm(w, w.transpose(1, 2)).sum()


def of_itself(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    moved = w - 0.1 * torch.bmm(a, b @ w.transpose(1, 2) @ w)
    return moved, a - 0.1 * torch.bmm(w, b.transpose(1, 2))


Layers = dict[str, Tensor]


def of_two_layers(layers: Layers, x: Tensor, y: Tensor) -> Layers:
    """A step on each client's network of one output."""

    def loss(w: Layers, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(x, w["first"], w["bias"]))
        return (y - nn.functional.linear(hidden, w["last"])).square().sum()

    gradient = torch.vmap(torch.func.grad(loss))(layers, x, y)
    return {name: w - 0.1 * gradient[name] for name, w in layers.items()}


def test_a_weight_is_overwritten_after_all_have_read_it() -> None:
    """A product with one output is fused into later kernels, which would read the weight after its step."""
    shapes = {"first": (5, 3, 2), "bias": (5, 3), "last": (5, 1, 3)}
    layers = {name: torch.randn(shape) for name, shape in shapes.items()}
    x, y = torch.randn(5, 2, 2), torch.randn(5, 2, 1)
    wanted = of_two_layers(layers, x, y)
    given = {name: w.clone() for name, w in layers.items()}
    found = stepped(graph.Graphs(), of_two_layers, given, x, y)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("step", [both_uses, chained, of_itself])
def test_steps_in_place_keep_the_numbers(step: Any) -> None:
    trees = torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    wanted = step(*trees)
    pair = trees[0].clone(), trees[1].clone()
    found = stepped(graph.Graphs(), lambda wa, b: step(*wa, b), pair, trees[2])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
