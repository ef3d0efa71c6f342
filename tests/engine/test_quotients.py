"""Steps with cancelled quotients and weights drawn by one kernel: their results are those of the step as written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hierfl.core import noise
from hierfl.core.normal_kernel import in_graph
from hierfl.engine.compiled import Graphs
from hierfl.engine.draws import shorten
from hierfl.engine.entrywise import MANY

aten = torch.ops.aten
SHAPE = (2, 1, MANY // 2)  # of two clients
State = dict[str, Tensor]


def state(shape: tuple[int, ...] = SHAPE) -> State:
    torch.manual_seed(0)
    names = ("loc", "log_scale", "prior_loc", "prior_log_scale", "x")
    return {name: 0.3 * torch.randn(shape, dtype=torch.float32) for name in names}


def kl_gradient(s: State) -> list[Tensor]:
    """Return the gradient of KL(Normal(loc, e^log_scale) || Normal(prior_loc, e^prior_log_scale)) / n.

    As in FedABML's step, that in the posterior and that in the prior are computed one by one.
    """

    def kl(parts: State) -> Tensor:
        parts = {**s, **parts}
        inverse = parts["prior_log_scale"].exp().reciprocal()
        ratio, away = (
            parts["log_scale"].exp() * inverse,
            (parts["loc"] - parts["prior_loc"]) * inverse,
        )
        return (0.5 * (ratio * ratio + away * away) - ratio.log()).sum() / 600.0

    found: list[Tensor] = []
    for names in (("loc", "log_scale"), ("prior_loc", "prior_log_scale")):
        found += torch.func.grad(kl)({name: s[name] for name in names}).values()
    return found


def by_hand(s: State) -> list[Tensor]:
    s = {name: value.double() for name, value in s.items()}
    ratio = torch.exp(2.0 * (s["log_scale"] - s["prior_log_scale"]))
    away = s["loc"] - s["prior_loc"]
    by_loc = away * torch.exp(-2.0 * s["prior_log_scale"])
    by_scale = ratio - 1.0
    by_prior = 1.0 - ratio - away * by_loc
    return [v / 600.0 for v in (by_loc, by_scale, -by_loc, by_prior)]


def traced(step: Callable[[State], list[Tensor]], s: State) -> Any:
    names = list(s)

    def flat(*leaves: Tensor) -> list[Tensor]:
        return step(dict(zip(names, leaves, strict=True)))

    with in_graph():
        graph = make_fx(flat)(*s.values())
    shorten(graph)
    return graph


def count(graph: Any, op: object) -> int:
    return sum(node.target is op for node in graph.graph.nodes)


def quotients(graph: Any) -> int:
    """Return how many quotients of tensors a graph takes."""
    divided = [n for n in graph.graph.nodes if n.target is aten.div.Tensor]
    by_tensors = sum(isinstance(node.args[1], fx.Node) for node in divided)
    return by_tensors + count(graph, aten.reciprocal.default)


def test_the_gradient_of_a_kl_takes_no_quotient() -> None:
    s = state()
    graph = traced(kl_gradient, s)
    assert quotients(graph) == 0
    torch.testing.assert_close(
        [v.double() for v in graph(*s.values())], by_hand(s), rtol=2e-5, atol=1e-8
    )


def test_a_divisor_that_underflows_does_not_make_nan() -> None:
    """With scales of e^-60, s / t of such scales is right, where 1 / (s t) overflows."""
    s = state()
    s |= {name: s[name] - 60.0 for name in ("log_scale", "prior_log_scale")}
    s["prior_loc"] = s["loc"].clone()
    found = traced(kl_gradient, s)(*s.values())[1]
    torch.testing.assert_close(found.double(), by_hand(s)[1], rtol=1e-4, atol=1e-7)


def test_small_tensors_stay_as_they_are() -> None:
    s = state((2, 1, 50))
    assert quotients(traced(kl_gradient, s)) > 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_sum_that_others_read_is_computed_once(kept: bool) -> None:
    """(a / b + d) b: the sum is multiplied out, unless it is a result itself."""

    def step(s: State) -> list[Tensor]:
        total = s["loc"] / s["x"].exp() + s["log_scale"]
        return [total * s["x"].exp().log().exp(), *([total] if kept else [])]

    def shared(s: State) -> list[Tensor]:
        scale = s["x"].exp()
        total = s["loc"] / scale + s["log_scale"]
        return [total * scale, *([total] if kept else [])]

    s = state()
    graph = traced(shared, s)
    assert quotients(graph) == int(kept)
    torch.testing.assert_close(graph(*s.values()), step(s), rtol=1e-5, atol=1e-6)


def test_a_quotient_of_equal_numbers_keeps_its_shape() -> None:
    def step(s: State) -> list[Tensor]:
        scale = s["x"].exp()
        one = scale * scale.reciprocal()
        return [one, 3.0 * one, (s["loc"] / scale + one) * scale]

    s = state()
    torch.testing.assert_close(traced(step, s)(*s.values()), step(s), rtol=1e-5, atol=1e-6)


KEYS = noise.client_keys(["a", "b"])


def drawn(keys: Tensor) -> Tensor:
    return noise.normals(noise.fold(keys, 3), SHAPE[1:], torch.float32)


def gradient_of_draw(s: State, z: Tensor) -> list[Tensor]:
    """Return a draw with noise z, and the gradient of a function of it in location and log scale."""

    def loss(loc: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        w = loc + log_scale.exp() * z
        return (w.sin() * s["x"]).sum(), w

    gradient, w = torch.func.grad(loss, (0, 1), has_aux=True)(s["loc"], s["log_scale"])
    return [w, *gradient]


@pytest.mark.parametrize("read", [False, True])
def test_weights_are_drawn_by_one_kernel_where_nothing_else_reads_their_noise(read: bool) -> None:
    s, ops = state() | {"keys": KEYS}, torch.ops.hierfl

    def step(s: State) -> list[Tensor]:
        z = drawn(s["keys"])
        return [*gradient_of_draw(s, z), *([z.abs()] if read else [])]

    graph = traced(step, s)
    assert count(graph, ops.samples_of.default) == int(not read)
    assert count(graph, ops.normals.default) == int(read)
    torch.testing.assert_close(graph(*s.values()), step(s), rtol=1e-5, atol=3e-6)


def test_scaled_noise_that_is_read_before_the_draw_stays() -> None:
    s = state() | {"keys": KEYS}

    def step(s: State) -> list[Tensor]:
        z, scale = drawn(s["keys"]), s["log_scale"].exp()
        first = (2.0 * z) * scale
        w = s["loc"] + scale * z
        return [first, w, (3.0 * z) * scale]

    graph = traced(step, s)
    graph.graph.lint()
    torch.testing.assert_close(graph(*s.values()), step(s), rtol=1e-5, atol=1e-5)


def test_a_scale_that_is_no_exponential_of_an_input_keeps_its_noise() -> None:
    s = state() | {"keys": KEYS}

    def step(s: State) -> list[Tensor]:
        z = noise.normals(s["keys"], SHAPE[1:], torch.float32)
        return [s["loc"] + torch.nn.functional.softplus(s["log_scale"]) * z]

    graph = traced(step, s)
    assert count(graph, torch.ops.hierfl.samples_of.default) == 0
    torch.testing.assert_close(graph(*s.values()), step(s), rtol=1e-5, atol=3e-6)


@pytest.mark.slow
def test_a_compiled_step_of_a_draw_and_a_kl_agrees_with_the_eager_one() -> None:
    """Inductor lowers what the passes make; a step writes its results over its inputs."""
    s = state()

    def step(work: State, x: Tensor, keys: Tensor) -> State:
        s = work | {"x": x}
        _, by_loc, by_scale = gradient_of_draw(s, drawn(keys))
        kl = kl_gradient(s)
        gradient = [by_loc + kl[0], by_scale + kl[1], *kl[2:]]
        return {k: v - 0.1 * g for (k, v), g in zip(work.items(), gradient, strict=True)}

    work = {name: s[name] for name in list(s)[:4]}
    eager = step(work, s["x"], KEYS)
    given = {k: v.clone() for k, v in work.items()}
    found = Graphs().run("step", step, given, s["x"], KEYS, give=True)
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=3e-6)
