"""A program as a pure function: its ELBO against Pyro's and against plain loops, and closed-form
KL.
"""

from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.inspect import get_model_relations
from torch import Tensor
from torch.distributions import kl_divergence

import hierfl
from hierfl import ClientBatch, ClientData, Phase, Program, full_batch, guides
from hierfl.data.batch import gather, keys_of
from hierfl.program.handlers import Substitute
from hierfl.program.program import Params, stacked
from hierfl.program.traces import divergence
from tests.programs import FAMILIES, Given, at_random, federation, read, regression, row_plan


def batch_of(data: ClientData, size: int | None, ids: Tensor) -> ClientBatch:
    """Return all rows of some clients, or the mini-batch of their first step."""
    if size is None:
        return full_batch(data, ids, seed=3)
    index, inside, _ = row_plan(
        data, ids, Phase(lambda work, message, b: work, batch_size=size), seed=3, at=(0,)
    )
    return gather(
        data,
        ids,
        index[0],
        None if bool(inside.all()) else inside[0],
        keys_of(data, ids, 3, 0),
        is_mini_batch=True,
    )


def pooled_params(program: Program, params: Params, clients: int) -> Params:
    """Return one client's local params for all clients, each shifted by 0.1 times its number."""
    local = {spec.name for spec in program.params if spec.is_local}
    rows = {
        k: torch.stack([v + 0.1 * c for c in range(clients)])
        for k, v in params.items()
        if k in local
    }
    return {**{k: v for k, v in params.items() if k not in local}, **stacked(program, rows)}


def params_of(program: Program, params: Params, k: int) -> Params:
    local = {spec.name for spec in program.params if spec.is_local}
    return {name: v + 0.1 * k if name in local else v for name, v in params.items()}


def drawn(program: Program, params: Params, batch: ClientBatch) -> Any:
    with Substitute(params, batch):
        return poutine.trace(program.guide).get_trace(batch)


# ------------------------------------------------------------------ the ELBO
def pyros_loss(program: Program, family: str, params: Any, batch: ClientBatch) -> float:
    """Return the loss of Pyro's ELBO at the values that the guide draws."""
    nodes = drawn(program, params, batch).nodes
    values = {name: site["value"] for name, site in nodes.items() if site["type"] == "sample"}
    pyros: Any = TraceMeanField_ELBO() if family == "mean_field" else Trace_ELBO()
    with Given(params, values):
        loss: float = pyros.loss(program.model, program.guide, batch)
    return loss


@cache
def regression_under(family: str) -> hierfl.Program:
    return read(regression, FAMILIES[family], federation())


@pytest.mark.slow("conditional-None")
@pytest.mark.usefixtures("global_generator_untouched")
@pytest.mark.parametrize(
    ("family", "size"),
    [(f, b) for f in FAMILIES for b in (None, 2, 100) if b is None or f != "conditional"],
)
def test_elbo_is_pyros_and_the_sum_of_the_clients(family: str, size: int | None) -> None:
    data, program = federation(), regression_under(family)
    start = at_random(program)
    everyone, params = torch.arange(4), pooled_params(program, start, 4)
    batch = batch_of(data, size, everyone)
    terms = program.terms(params, batch)
    whole = terms.nll.sum() + terms.local_kl.sum() + terms.global_kl
    assert pyros_loss(program, family, params, batch) == pytest.approx(whole.item(), rel=1e-10)
    alone = [
        program.terms(params_of(program, start, k), batch_of(data, size, everyone[k : k + 1]))
        for k in range(4)
    ]
    losses = torch.stack([t.loss(program.share)[0] for t in alone])
    assert losses.sum().item() == pytest.approx(whole.item(), rel=1e-10)
    assert torch.allclose(torch.stack([t.nll[0] for t in alone]), terms.nll, rtol=1e-10)
    assert torch.allclose(torch.stack([t.local_kl[0] for t in alone]), terms.local_kl, rtol=1e-10)


@pytest.mark.parametrize("counts", [(4,), (5, 3, 7)])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_elbo_by_plain_loops(counts: tuple[int, ...], size: int) -> None:
    """Written without plates, scales and masks: the rows of a step count N_k / B times."""
    data = federation(counts)
    program = read(regression, guides.mean_field, data)
    params, n = at_random(program), len(counts)
    index, inside, _ = row_plan(
        data,
        torch.arange(n),
        Phase(lambda work, message, b: work, batch_size=size),
        seed=3,
        at=(0,),
    )
    terms = program.terms(pooled_params(program, params, n), batch_of(data, size, torch.arange(n)))
    for k in range(n):
        mine = params_of(program, params, k)
        trace = drawn(program, mine, full_batch(data, torch.tensor([k]), seed=3))
        value = {name: trace.nodes[name]["value"] for name in ("loc", "spread", "lift", "slope")}
        rows = index[0, k][inside[0, k]]
        x, y = data.fields["x"][rows], data.fields["y"][rows]
        nll = -dist.Normal(x @ value["slope"].flatten(), 1.0).log_prob(y).sum() * (
            counts[k] / len(rows)
        )
        assert terms.nll[k].item() == pytest.approx(nll.item(), rel=1e-12)
        prior = dist.Normal(
            value["loc"] + value["lift"] * data.client_fields["height"][k], value["spread"]
        )
        scale = torch.nn.functional.softplus(mine["slope.scale"])
        kl = kl_divergence(dist.Normal(mine["slope.loc"], scale), prior).sum()
        assert terms.local_kl[k].item() == pytest.approx(kl.item(), rel=1e-12)


def test_gradient_is_pyros() -> None:
    data = federation()
    program = read(regression, guides.mean_field, data)
    batch = full_batch(data, torch.arange(4), seed=3)
    params = {
        k: v.requires_grad_() for k, v in pooled_params(program, at_random(program), 4).items()
    }
    terms = program.terms(params, batch)
    ours = torch.autograd.grad(
        terms.nll.sum() + terms.local_kl.sum() + terms.global_kl, list(params.values())
    )

    def guide(batch: ClientBatch) -> None:
        with Substitute(params, batch):
            program.guide(batch)

    pyros = torch.autograd.grad(
        TraceMeanField_ELBO().differentiable_loss(regression, guide, batch), list(params.values())
    )
    for a, b in zip(ours, pyros, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def factored(batch: ClientBatch) -> None:
    """Factors inside and outside the plate, a global observation, one a client, and a
    deterministic site.
    """
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    pyro.factor("global_factor", -0.3 * loc**2)
    pyro.sample("pilot", dist.Normal(loc, 0.5), obs=torch.tensor(2.0))
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(loc, 1.0))
        pyro.factor("own_factor", -0.1 * shift**4)
        pyro.deterministic("twice", 2.0 * shift)
        pyro.sample("height", dist.Normal(shift, 1.0), obs=batch.height)
        with batch.data():
            pyro.sample("y", dist.Normal(shift, 1.0), obs=batch.y)


@pytest.mark.parametrize("family", ["mean_field", "conditional"])
def test_factors_and_observations_outside_rows_count_once(family: str) -> None:
    data = federation()
    program = read(factored, FAMILIES[family], data)
    start = at_random(program)
    params, batch = pooled_params(program, start, 4), full_batch(data, torch.arange(4), seed=3)
    terms = program.terms(params, batch)
    whole = terms.nll.sum() + terms.local_kl.sum() + terms.global_kl
    assert pyros_loss(program, family, params, batch) == pytest.approx(whole.item(), rel=1e-10)
    losses = [
        program.terms(
            params_of(program, start, k), full_batch(data, torch.tensor([k]), seed=3)
        ).loss(program.share)
        for k in range(4)
    ]
    assert torch.cat(losses).sum().item() == pytest.approx(whole.item(), rel=1e-10)


# ------------------------------------------------------------------ closed-form KL
def chain(batch: ClientBatch) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(2.0 * a, 0.5))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(c, 1.0), obs=batch.y)


def forwards(batch: ClientBatch) -> None:
    a = pyro.sample("a", dist.Normal(0.3, 0.7))
    pyro.sample("c", dist.Normal(1.5 * a, 0.6))


def backwards(batch: ClientBatch) -> None:
    c = pyro.sample("c", dist.Normal(0.5, 1.1))
    pyro.sample("a", dist.Normal(0.4 * c, 0.3))


def chained(of_first: float, scale: float, slope: float, step: float, *, swap: bool = False) -> Any:
    """Return the joint of u ~ Normal(of_first, scale^2), v ~ Normal(slope u, step^2), as (u, v)
    or (v, u).
    """
    tril = torch.tensor([[scale, 0.0], [slope * scale, step]])
    order = [1, 0] if swap else [0, 1]
    cov = (tril @ tril.T)[order][:, order]
    return dist.MultivariateNormal(torch.tensor([of_first, slope * of_first])[order], cov)


@pytest.mark.parametrize(
    ("guide", "closed", "q"),
    [
        (forwards, {"a", "c"}, chained(0.3, 0.7, 1.5, 0.6)),
        (backwards, {"a"}, chained(0.5, 1.1, 0.4, 0.3, swap=True)),
    ],
)
def test_closed_form_only_where_the_order_of_draws_allows_it(
    guide: Any, closed: set[str], q: Any
) -> None:
    """`backwards` draws c before its parent a.

    The mean of KL(q(c) || p(c | a)) at a's draw is then not that of log q - log p.
    """
    data = federation((3, 2))
    program = read(chain, guide, data)
    assert program.closed == closed
    batch = full_batch(data, torch.tensor([0]))
    draws = torch.vmap(lambda d: program.terms({}, batch.redrawn(d)).global_kl)(
        torch.arange(40_000, dtype=torch.int32)
    )
    exact = kl_divergence(q, chained(0.0, 1.0, 2.0, 0.5)).item()
    error = (draws.std() / len(draws) ** 0.5).item()
    assert error < 0.05
    assert abs(draws.mean().item() - exact) < 4.0 * error


def test_closed_form_has_no_noise() -> None:
    def wide(batch: ClientBatch) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Exponential(1.0))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)

    def guide(batch: ClientBatch) -> None:
        pyro.sample("a", dist.Normal(0.3, 0.7))
        pyro.sample("b", dist.LogNormal(0.0, 0.5))

    data = federation((3, 2))
    program = read(wide, guide, data)
    assert program.closed == {"a"}, "Exponential and LogNormal have no closed form"
    batch = full_batch(data, torch.tensor([0]))
    kl = torch.vmap(lambda d: program.terms({}, batch.redrawn(d)).global_kl)(
        torch.arange(4000, dtype=torch.int32)
    )
    a = kl_divergence(dist.Normal(0.3, 0.7), dist.Normal(0.0, 1.0)).item()
    # E log q - log p of b: minus the LogNormal's entropy, plus its mean exp(s^2 / 2)
    b = (
        -(0.5 * torch.log(torch.tensor(2.0 * torch.pi * torch.e * 0.25))).item()
        + torch.tensor(0.125).exp().item()
    )
    assert kl.mean().item() == pytest.approx(a + b, abs=4.0 * (kl.std() / 4000**0.5).item())
    assert kl.std() > 0.1


def test_the_divergence_of_two_normals_is_torchs_with_its_slopes() -> None:
    g = torch.Generator().manual_seed(0)
    at = tuple(torch.rand(3, 4, 5, generator=g) + 0.5 for _ in range(4))

    def found(kl: Any, *at: Tensor) -> Tensor:
        return kl(dist.Normal(at[0], at[1]).to_event(2), dist.Normal(at[2], at[3]).to_event(2))

    torch.testing.assert_close(found(divergence, *at), found(kl_divergence, *at))
    slopes = [
        torch.func.grad(lambda *v, kl=kl: found(kl, *v).sum(), (0, 1, 2, 3))(*at)
        for kl in (divergence, kl_divergence)
    ]
    torch.testing.assert_close(*slopes)


def test_a_divergence_that_has_no_form_is_refused_as_torch_does() -> None:
    with pytest.raises(NotImplementedError):
        divergence(dist.Normal(0.0, 1.0), dist.Cauchy(0.0, 1.0))


# ------------------------------------------------------------------ a user's own model under Pyro's
# tools
def test_pyro_draws_the_graph_of_a_model_on_a_batch() -> None:
    """`pyro.render_model` needs graphviz for the picture alone."""
    relations = get_model_relations(regression, (hierfl.full_batch(federation()),))
    assert relations["observed"] == ["y"]
    assert set(relations["sample_sample"]["slope"]) == {"loc", "spread", "lift"}
    assert relations["plate_sample"] == {"clients": ["slope", "y"], "data": ["y"]}
