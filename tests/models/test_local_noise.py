"""Local reparameterization: the same expected likelihood, with less gradient noise, on every engine."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pyro
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hierfl import guides, models
from hierfl.core.trees import tree_leaves
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.models.likelihood import normal
from hierfl.program.program import Program
from hierfl.program.read import read

DRAWS = 4000


def mlp(*sizes: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[
            : 2 * len(layers) - 1
        ]


@pytest.fixture
def data() -> ClientData:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(30, 3, generator=g)
    x[::7] = 0.0  # rows of zeros, whose outputs vary through the bias alone
    return ClientData.from_arrays(torch.arange(30) % 3, x=x, y=torch.arange(30) % 2, z=x.sum(1))


def program(data: ClientData, net: nn.Module, *, local: bool, **options: Any) -> Program:
    return read(
        models.bayesian_network(net, local_reparameterization=local, **options),
        guides.mean_field,
        data,
    )


def nll(program: Program, params: Any, data: ClientData, draws: int) -> Tensor:
    """Negative log likelihood of client 1's rows at each draw, (draws,)."""
    batch = full_batch(data, torch.tensor([1]), seed=5)
    return torch.vmap(lambda d: program.terms(params, batch.redrawn(d)).nll.sum())(
        torch.arange(draws, dtype=torch.int32)
    )


def params_of(program: Program) -> Any:
    shared, own = program.start()
    return {
        **shared,
        **{name: v + (0.3 if name.endswith("loc") else 0.0) for name, v in own.items()},
    }


def test_likelihood_and_gradient_have_the_same_mean(data: ClientData) -> None:
    """Two layers, so that the second takes sampled outputs of the first as its input.

    The standard error includes both estimates; a difference of 5 standard errors is allowed.
    """
    found = []
    for local in (False, True):
        p = program(data, mlp(3, 4, 2), local=local)
        params = params_of(p)
        own = {name: v for name, v in params.items() if name.startswith("w.")}

        def each(d: Tensor, p: Program = p, params: Any = params, own: Any = own) -> Tensor:
            batch = full_batch(data, torch.tensor([1]), seed=5).redrawn(d)

            def loss(own: Any) -> Tensor:
                return p.terms({**params, **own}, batch).nll.sum()

            slopes, value = torch.func.grad_and_value(loss)(own)
            return torch.cat([value[None], *(v.flatten() for v in tree_leaves(slopes))])

        values = torch.vmap(each, chunk_size=500)(torch.arange(DRAWS, dtype=torch.int32))
        found.append((values.mean(0), values.std(0) / DRAWS**0.5, values.std(0)))
    (one, error_1, noise_1), (two, error_2, noise_2) = found
    distance = (one - two).abs() / (error_1.square() + error_2.square()).sqrt().clamp(min=1e-12)
    assert float(distance.max()) < 5.0
    assert float(noise_2[1:].square().sum() / noise_1[1:].square().sum()) < 0.9, (
        "the gradient is less noisy"
    )


def test_linear_layer_matches_the_closed_form_expectation(data: ClientData) -> None:
    """E (z - x w - b)^2 / 2 s^2 = ((z - x m - m_b)^2 + x^2 v + v_b) / 2 s^2 for Normal weights."""
    p = program(data, mlp(3, 1), local=True, likelihood=normal(0.5), y="z")
    params, batch = params_of(p), full_batch(data, torch.tensor([1]))
    scale = {
        name: float(torch.nn.functional.softplus(v).mean())
        for name, v in params.items()
        if name.endswith("scale")
    }
    x, z = batch.x[0], batch.z[0]
    mean = x @ params["w.0.weight.loc"].flatten() + params["w.0.bias.loc"].flatten()
    variance = x.square().sum(1) * scale["w.0.weight.scale"] ** 2 + scale["w.0.bias.scale"] ** 2
    expected = (
        ((z - mean).square() + variance) / (2 * 0.5**2)
        + torch.tensor(0.5 * (2 * torch.pi) ** 0.5).log()
    ).sum()
    values = nll(p, params, data, DRAWS)
    assert abs(float(values.mean() - expected)) < 5.0 * float(values.std()) / DRAWS**0.5


def test_gradient_is_finite_where_all_inputs_are_zero(data: ClientData) -> None:
    p = program(data, nn.Linear(3, 2, bias=False), local=True)
    params, batch = params_of(p), full_batch(data, torch.tensor([0]))
    slopes = torch.func.grad(lambda v: p.terms(v, batch).nll.sum())(params)
    assert all(bool(v.isfinite().all()) for v in tree_leaves(slopes))


def test_weights_are_not_sampled_where_outputs_are(data: ClientData) -> None:
    """Sampling the weights would be most of the work.

    A graph in which draws are made has one cosine for every two normal numbers, so their sizes
    count the draws.
    """
    counts = []
    for local in (False, True):
        p = program(data, mlp(3, 50, 2), local=local)
        params, batch = params_of(p), full_batch(data, torch.tensor([1]))
        with pyro.validation_enabled(False):
            traced = make_fx(
                partial(lambda p, batch, params: p.terms(params, batch).nll, p, batch)
            )(params)
        traced.graph.eliminate_dead_code()
        counts.append(
            sum(
                n.meta["val"].numel()
                for n in traced.graph.nodes
                if n.target is torch.ops.aten.cos.default
            )
        )
    assert counts[0] == (3 * 50 + 50 + 100 + 2) / 2
    assert counts[1] == (10 * 50 + 10 * 2) / 2


def test_other_guides_sample_weights_as_usual(data: ClientData) -> None:
    for guide in (guides.delta, guides.low_rank):
        one, two = (
            read(models.bayesian_network(mlp(3, 2), local_reparameterization=on), guide, data)
            for on in (False, True)
        )
        params = params_of(one)
        torch.testing.assert_close(
            nll(one, params, data, 3), nll(two, params, data, 3), rtol=0.0, atol=0.0
        )


def test_non_centered_weights_raise() -> None:
    with pytest.raises(ValueError, match="local_reparameterization is set and centered is False"):
        models.bayesian_network(mlp(3, 2), local_reparameterization=True, centered=False)
