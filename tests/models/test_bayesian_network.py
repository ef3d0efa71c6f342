"""Bayesian networks: local and global tensors, densities by hand, and agreement of all engines."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import logsumexp
from torch import nn
from torch.func import functional_call

from hierfl import ClientData, Program, guides, models, read
from hierfl.program.handlers import untouched_store
from tests.models import scene
from tests.models.scene import (
    check_every_engine,
    densities,
    everyone,
    params_at_random,
    rows_of,
    values_at_random,
)


def mlp(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


def names(program: Program) -> tuple[set[str], set[str], set[str]]:
    """Names of the local sites, of the global sites, and of the model's own params."""
    local = {site.name for site in program.latents.local_block.sites}
    return (
        local,
        {site.name for site in program.latents.global_block.sites},
        set(params_at_random(program)),
    )


EVERY = {"0.weight", "0.bias", "2.weight", "2.bias"}
# called inside a test, because the default dtype there differs from that at import
STANDARD = functools.partial(dist.Normal, 0.0, 1.0)
ABOUT_ZERO = {"prior_loc": "zero", "centered": False}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "all local": dict,
    "not centered": lambda: {"centered": False},
    "all points": lambda: {"local": "none"},
    "all global": lambda: {"local": "none", "global_prior": STANDARD()},
    "local head": lambda: {"local": ["2."], "global_prior": STANDARD(), "prior_loc": STANDARD()},
    "learned scale": lambda: {"local": "bias$", "prior_scale": "learned"},
    "scale with a prior": lambda: {"prior_scale": dist.HalfNormal(1.0), **ABOUT_ZERO},
    "fixed prior": lambda: {"prior_loc": "module", "prior_scale": 2.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_agrees(kind: str, data: ClientData) -> None:
    program = read(
        models.bayesian_network(mlp(), y="kind", **KINDS[kind]()), guides.mean_field, data
    )
    assert program.labels["kind"] == "kind"
    own = check_every_engine(program, data, values_at_random(program), params_at_random(program))
    assert own.isfinite().all()


@pytest.mark.parametrize(
    ("options", "local"),
    [
        ({}, EVERY),
        ({"local": "none"}, set()),
        ({"local": ["2."]}, {"2.weight", "2.bias"}),
        ({"local": ("0.bias", "2.bias")}, {"0.bias", "2.bias"}),
        ({"local": r"\.weight$"}, {"0.weight", "2.weight"}),
        ({"local": lambda name: name.startswith("0")}, {"0.weight", "0.bias"}),
    ],
)
def test_local_and_global(options: dict[str, Any], local: set[str], data: ClientData) -> None:
    def found(**more: Any) -> tuple[set[str], set[str], set[str]]:
        return names(
            read(models.bayesian_network(mlp(), y="kind", **options, **more), guides.delta, data)
        )

    own, theta = {f"w.{name}" for name in local}, {f"theta.{name}" for name in EVERY}
    above = {f"theta.{name}" for name in EVERY - local}
    scale = {f"scale.{name}" for name in local}
    assert found() == (own, set(), theta)
    assert found(prior_loc="zero", prior_scale="learned") == (own, set(), above | scale)
    assert found(prior_scale=dist.HalfNormal(1.0)) == (own, scale, theta)
    normal = dist.Normal(0.0, 1.0)
    assert found(prior_loc=normal, global_prior=normal) == (own, theta, set())
    offsets = {f"{name}_offset" for name in own}
    assert found(prior_loc="module", centered=False) == (offsets, set(), above)


def test_density_by_hand(data: ClientData) -> None:
    model = models.bayesian_network(
        nn.Linear(2, 3), y="kind", local=["weight"], prior_scale="learned", scale_start=0.4
    )
    program = read(model, guides.mean_field, data)
    start, _ = program.start()
    values, params = values_at_random(program), params_at_random(program)
    assert values["w.weight"].shape == (3, 1, 3, 2)
    own = check_every_engine(program, data, values, params)
    scale = np.log1p(np.exp(params["scale.weight"].numpy()))
    for k in range(3):
        rows, w = rows_of(data, k), values["w.weight"][k, 0].numpy()
        logits = rows["x"] @ w.T + params["theta.bias"].numpy()
        chosen = logits[np.arange(len(logits)), rows["kind"]]
        likelihood = (chosen - logsumexp(logits, axis=1)).sum()
        prior = scene.normal(w, params["theta.weight"].numpy(), scale)
        assert own[k].item() == pytest.approx(likelihood + prior)
    started = nn.functional.softplus(start["scale.weight"])
    torch.testing.assert_close(started, torch.full((3, 2), 0.4))


def test_global_sites_by_hand(data: ClientData) -> None:
    priors: dict[str, Any] = {
        "prior_loc": dist.Normal(0.0, 2.0),
        "prior_scale": dist.HalfNormal(0.5),
    }
    priors["global_prior"] = dist.Normal(0.0, 3.0)
    model = models.bayesian_network(mlp(), y="kind", local=["2."], **priors)
    program = read(model, guides.delta, data)
    values = values_at_random(program)
    v = scene.numbers(values, 0, set())
    by_hand = sum(
        scene.normal(v[f"theta.0.{p}"], 0.0, 3.0) + scene.normal(v[f"theta.2.{p}"], 0.0, 2.0)
        for p in ("weight", "bias")
    )
    by_hand += sum(scene.half_normal(v[f"scale.2.{p}"], 0.5) for p in ("weight", "bias"))
    assert values["scale.2.weight"].shape == ()
    assert densities(program, values, everyone(data))[1].item() == pytest.approx(by_hand)


def test_network_has_the_loss_and_gradient_of_plain_torch(data: ClientData) -> None:
    net = mlp()
    program = read(models.network(net, y="kind"), guides.delta, data)
    assert names(program) == (set(), set(), {f"theta.{name}" for name in EVERY})
    start, own = program.start()
    assert own == {}
    batch, rows = scene.alone(data, 0), rows_of(data, 0)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return program.terms(params, batch).nll.sum()

    def plain(params: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = {name.removeprefix("theta."): value for name, value in params.items()}
        output = functional_call(net, weights, (torch.as_tensor(rows["x"]),))
        return nn.functional.cross_entropy(output, torch.as_tensor(rows["kind"]), reduction="sum")

    torch.testing.assert_close(
        torch.func.grad_and_value(loss)(start), torch.func.grad_and_value(plain)(start)
    )


def test_guides_start_at_the_weights_of_the_module(data: ClientData) -> None:
    net = mlp()
    weight = net.get_parameter("0.weight").detach()
    learned = read(models.bayesian_network(net, y="kind"), guides.delta, data)
    torch.testing.assert_close(learned.start()[0]["theta.0.weight"], weight)
    torch.testing.assert_close(learned.start()[1]["w.0.weight.at"], weight[None, None])
    for centered, name in ((True, "w.0.weight"), (False, "w.0.weight_offset")):
        how: dict[str, Any] = {"prior_loc": "zero", "prior_scale": 0.5, "centered": centered}
        model = models.bayesian_network(net, y="kind", **how)
        with untouched_store():
            nodes: Any = pyro.poutine.trace(model).get_trace(everyone(data)).nodes
        start = nodes[name]["infer"]["start"]
        torch.testing.assert_close(start, weight if centered else weight / 0.5)


def test_later_changes_of_the_module_have_no_effect(data: ClientData) -> None:
    net = mlp()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    program = read(models.network(net, y="kind"), guides.delta, data)
    with torch.no_grad():
        net.get_parameter("0.weight").zero_()
    torch.testing.assert_close(program.start()[0]["theta.0.weight"], before["0.weight"])


def test_frozen_and_tied_parameters(data: ClientData) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)
            self.second.weight = self.first.weight
            self.out.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(self.second(self.first(x).tanh()))
            return result

    program = read(models.bayesian_network(Tied(), y="kind"), guides.delta, data)
    assert names(program)[0] == {"w.first.weight", "w.first.bias", "w.second.bias"}
    check_every_engine(program, data, values_at_random(program), params_at_random(program))
