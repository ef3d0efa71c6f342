"""Newton's method, the mode and its derivative, as the conditional guide uses them, for non-Gaussian rows."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Program, full_batch, guides
from hierfl.laplace.mode import climb, curvature, mode_and_precision, newton_step
from hierfl.program.handlers import Substitute
from tests.programs import at_random, federation, fit, logistic, read
from tests.sampled import sampled


def counted(batch: ClientBatch) -> None:
    """Poisson counts with varying slopes of unknown spread."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, spread).to_event(1))
        with batch.data():
            pyro.sample("visits", dist.Poisson((batch.x * slope).sum(-1).exp()), obs=batch.visits)


def offset(batch: ClientBatch) -> None:
    """Logistic regression, not centered: the global site enters the likelihood, not the local site's prior."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * z * spread).sum(-1)), obs=batch.ill)


MODELS: dict[str, Any] = {"Bernoulli": logistic, "Poisson": counted, "non-centered": offset}


def loss(program: Program, params: dict[str, Tensor], batch: ClientBatch) -> Tensor:
    terms = program.terms(params, batch)
    return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, ["Bernoulli"]))
def test_gradients_through_the_mode(name: str) -> None:
    """Gradients of the whole ELBO, with the noise held fixed, against central differences."""
    data = federation((6, 4))
    program = read(MODELS[name], guides.conditional(newton_steps=12), data)
    batch = full_batch(data, torch.arange(2), seed=1)
    params = {k: v.requires_grad_() for k, v in at_random(program, by=0.2).items()}
    gradient = dict(
        zip(
            params,
            torch.autograd.grad(loss(program, params, batch), list(params.values())),
            strict=True,
        )
    )
    h = 1e-5
    for site, value in params.items():
        for i in range(value.numel()):
            if site == "_shared.lower" and i // value.shape[-1] <= i % value.shape[-1]:
                continue  # above the diagonal, unused
            moved = []
            for sign in (1.0, -1.0):
                there = value.detach().clone()
                there.view(-1)[i] += sign * h
                moved.append(
                    loss(
                        program, {**{k: v.detach() for k, v in params.items()}, site: there}, batch
                    )
                )
            numeric = float((moved[0] - moved[1]) / (2 * h))
            assert gradient[site].reshape(-1)[i].item() == pytest.approx(
                numeric, rel=1e-5, abs=1e-6
            ), (site, i)


@pytest.mark.slow("Poisson", "Bernoulli")
@pytest.mark.parametrize("name", MODELS)
def test_the_guide_has_the_mode_as_its_mean_and_the_curvature_there(name: str) -> None:
    data = federation((6, 4, 1))
    program = read(MODELS[name], guides.conditional(newton_steps=10), data)
    params, batch = at_random(program, by=0.2), full_batch(data, torch.arange(3), seed=1)
    with Substitute(params, batch):
        trace = pyro.poutine.trace(program.guide).get_trace(batch)
    own: Any = trace.nodes["_local"]["fn"]
    shared: dict[str, Any] = {
        n: trace.nodes[n]["value"] for n in ("loc", "spread") if n in trace.nodes
    }
    site = "z" if name == "non-centered" else "slope"

    def joint(vector: Tensor) -> Tensor:
        total = torch.zeros(())
        with pyro.poutine.block(), pyro.poutine.condition(data={**shared, site: vector}):
            model = pyro.poutine.trace(program.model).get_trace(batch)
        nodes: Any = model.nodes.values()
        for node in nodes:
            is_site = (
                node["type"] == "sample"
                and (node["is_observed"] or node["name"] == site)
                and node["name"] not in shared
            )
            if is_site and any(f.name == "clients" for f in node["cond_indep_stack"]):
                there = torch.tensor(True) if node["mask"] is None else node["mask"]
                total = total + torch.where(there, node["fn"].log_prob(node["value"]), 0.0).sum()
        return total

    mode = own.loc.detach().requires_grad_()
    (slope,) = torch.autograd.grad(joint(mode), mode)
    assert slope.abs().max() < 1e-6
    hessian: Any = torch.autograd.functional.hessian(joint, mode.detach())
    for k in range(3):
        assert torch.allclose(
            own.precision_matrix[k, 0], -hessian[k, 0, :, k, 0, :], rtol=1e-5, atol=1e-7
        )
        assert float(hessian[k, 0, :, (k + 1) % 3, 0, :].abs().max()) == 0.0


@pytest.mark.slow("Bernoulli-30.0-15", "Bernoulli-5.0-5")
@pytest.mark.parametrize(
    ("name", "size", "newton_steps"),
    [("Bernoulli", 5.0, 5), ("Bernoulli", 30.0, 15), ("Poisson", 3.0, 5)],
)
def test_newton_does_not_diverge_on_separable_rows(
    name: str, size: float, newton_steps: int
) -> None:
    """All ill, none ill or split by a plane at large x; no counts or many. Only the prior bounds the mode."""
    x = size * torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    split = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    rows = {
        "all": {"x": x, "ill": torch.ones(3), "visits": torch.full((3,), 3.0)},
        "none": {"x": x, "ill": torch.zeros(3), "visits": torch.zeros(3)},
        "split": {"x": torch.cat([x, -x]), "ill": split, "visits": 50.0 * split},
    }
    guide = guides.conditional(newton_steps=newton_steps)
    fitted = fit(
        hierfl.methods.fedsvi(MODELS[name], guide), ClientData.from_clients(rows), rounds=5
    )
    assert bool(torch.tensor(fitted.history["elbo"].tolist()).isfinite().all())
    own = fitted.draws(100).own["slope"]
    assert bool(own.isfinite().all())
    assert float(own.abs().max()) < 5.0


def test_newton_in_one_step_on_a_quadratic_and_never_downhill() -> None:
    precision = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    top = torch.tensor([1.0, -2.0])

    def bowl(v: Tensor) -> Tensor:
        return -0.5 * torch.einsum("cbi,ij,cbj->c", v - top, precision, v - top)

    start = torch.tensor([[[0.0, 0.0]], [[2.0, 1.0]]])
    slope, minus = curvature(bowl, start)
    assert torch.allclose(minus, precision.expand(2, 1, 2, 2))
    assert torch.allclose(slope, ((top - start) @ precision))
    mode, at_mode = mode_and_precision(bowl, start)
    assert torch.allclose(mode, top.expand(2, 1, 2), atol=1e-12)
    assert torch.allclose(at_mode, minus)
    far = climb(bowl, start + 100.0, steps=60, cap=4.0)
    assert torch.allclose(far, top.expand(2, 1, 2), atol=1e-6)
    assert newton_step(slope, minus, cap=0.5).norm(dim=-1).max() <= 0.5 + 1e-12
    # Where the density is convex, the step still leads uphill.
    uphill = newton_step(
        torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[[-2.0, 0.0], [0.0, 1.0]]]]), cap=10.0
    )
    assert torch.allclose(uphill, torch.tensor([[[0.5, 0.0]]]))
