"""Linear-Gaussian hierarchies of known variances, whose posterior and evidence have closed forms.

Under a Gaussian guide the loss is quadratic in the noise. Its expectation is therefore an exact
average over a few points, and no random draws are needed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from hierfl import ClientBatch, ClientData, Program, full_batch, guides
from hierfl.program.handlers import Substitute
from hierfl.program.program import Params, stacked
from hierfl.program.sites import Family, Model
from hierfl.program.traces import Terms
from tests.programs import Exact, exact, federation, means, read, slopes, three

CASES: dict[str, tuple[Model, Callable[[], ClientData]]] = {
    "means": (means, three),
    "slopes": (slopes, lambda: federation((5, 3, 7, 1))),
}


class Points(Messenger):
    """Set Gaussian sites at given noise instead of drawing them.

    The noise `eps` (..., d) is consumed in the order of the sites.
    """

    def __init__(self, eps: Tensor) -> None:
        super().__init__()
        self.eps, self.used = eps, 0

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        fn = msg["fn"]
        is_drawn = hasattr(fn, "rsample") and not isinstance(fn, dist.Delta)
        if msg["done"] or msg["is_observed"] or not is_drawn:
            return
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if not hasattr(fn, "loc"):
            return  # a plate
        d = fn.loc.shape[-1] if msg["fn"].event_shape else 1
        eps = self.eps[self.used : self.used + d]
        self.used += d
        if hasattr(fn, "scale_tril"):
            value = fn.loc + (fn.scale_tril @ eps.expand(fn.loc.shape)[..., None])[..., 0]
        else:
            value = fn.loc + fn.scale * (eps if msg["fn"].event_shape else eps[0])
        msg["value"], msg["done"] = value, True


def at_point(program: Program, params: Params, batch: ClientBatch, eps: Tensor) -> Terms:
    def guide(b: ClientBatch) -> None:
        with Points(eps):
            program.guide(b)

    return replace(program, guide=guide).terms(params, batch)


def points(d: int) -> Tensor:
    """Return 2 d points of mean 0 and covariance 1, which integrate quadratics exactly."""
    return torch.cat([torch.eye(d), -torch.eye(d)]) * d**0.5


def expected(program: Program, params: Params, batch: ClientBatch, d: int) -> Tensor:
    terms = [at_point(program, params, batch, eps) for eps in points(d)]
    return torch.stack([t.nll.sum() + t.local_kl.sum() + t.global_kl for t in terms]).mean()


def optimum(case: str, family: Family) -> tuple[Program, Params, ClientBatch, float, int]:
    """Return program, params, batch, ELBO and the noise's dimension, after L-BFGS on the expected loss."""
    model, make = CASES[case]
    data = make()
    program = read(model, family, data)
    d = 2 if case == "means" else 4
    batch = full_batch(data, torch.arange(data.num_clients))
    shared, own = program.start()
    own = {k: v.expand(data.num_clients, *v.shape).clone() for k, v in own.items()}
    rows = stacked(program, own)
    params = {k: v.clone().requires_grad_() for k, v in {**shared, **rows}.items()}
    how: dict[str, Any] = {"line_search_fn": "strong_wolfe", "tolerance_grad": 1e-10}
    leaves = list(params.values())
    optimizer = torch.optim.LBFGS(leaves, max_iter=600, tolerance_change=1e-16, **how)

    def closure() -> float:
        optimizer.zero_grad()
        loss = expected(program, params, batch, d)
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    found = {k: v.detach() for k, v in params.items()}
    return program, found, batch, -expected(program, found, batch, d).item(), d


def moments(
    program: Program, params: Params, batch: ClientBatch, d: int, sites: tuple[str, str]
) -> tuple[Tensor, ...]:
    """Return the mean and covariance of the global site, (d), and of each local site, (C, d).

    They are exact because the sites are linear in the noise.
    """
    values = []
    for eps in points(d):
        with Substitute(params, batch), Points(eps):
            nodes: Any = pyro.poutine.trace(program.guide).get_trace(batch).nodes
        above, mine = (nodes[site]["value"] for site in sites)
        values.append((above.reshape(-1), mine.reshape(batch.num_clients, -1)))
    g, own = torch.stack([v[0] for v in values]), torch.stack([v[1] for v in values])
    about, apart = g - g.mean(0), own - own.mean(0)
    return (
        g.mean(0),
        torch.einsum("si,sj->ij", about, about) / len(values),
        own.mean(0),
        torch.einsum("ski,skj->kij", apart, apart) / len(values),
    )


@cache
def structured(case: str) -> tuple[Program, Params, ClientBatch, float, int]:
    return optimum(case, guides.structured)


@pytest.mark.slow("slopes")
@pytest.mark.parametrize("case", CASES)
def test_the_structured_guide_is_exact(case: str) -> None:
    program, params, batch, elbo, d = structured(case)
    truth = exact(CASES[case][1](), case)
    assert elbo == pytest.approx(truth.log_evidence, abs=1e-6)
    loc, cov, own_loc, own_cov = moments(program, params, batch, d, ("g", "b"))
    assert torch.allclose(loc, truth.loc, atol=1e-3)
    assert torch.allclose(cov, truth.cov, atol=2e-3)
    assert torch.allclose(own_loc, truth.own_loc, atol=1e-3)
    assert torch.allclose(own_cov, truth.own_cov, atol=2e-3)


def test_mean_field_on_e2_is_too_narrow_by_the_known_factor() -> None:
    program, params, batch, elbo, d = optimum("means", guides.mean_field)
    assert elbo == pytest.approx(-12.6928251, abs=1e-6)
    assert -12.4900925468 - elbo == pytest.approx(0.2027326, abs=1e-6)
    loc, cov, own_loc, _ = moments(program, params, batch, d, ("g", "b"))
    assert cov.item() == pytest.approx(1.0 / 3.25, abs=1e-4)
    assert loc.item() == pytest.approx(1.846154, abs=1e-3)
    assert own_loc[:, 0].tolist() == pytest.approx([1.615385, 0.923077, 3.461538], abs=1e-3)


def at_truth(program: Program, truth: Exact) -> Params:
    tril = torch.linalg.cholesky(truth.cov)
    scale = tril.diagonal()
    return {
        "_shared.loc": truth.loc,
        "_shared.scale": torch.log(torch.expm1(scale)),
        "_shared.lower": tril / scale[:, None],
    }


@pytest.mark.slow("slopes-5", "means-5")
@pytest.mark.parametrize("newton_steps", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_the_conditional_guide_is_exact_draw_by_draw(case: str, newton_steps: int) -> None:
    model, make = CASES[case]
    data, truth = make(), exact(make(), case)
    program = read(model, guides.conditional(newton_steps=newton_steps), data)
    params = {k: v.requires_grad_() for k, v in at_truth(program, truth).items()}
    assert params.keys() == program.start()[0].keys()
    batch = full_batch(data, torch.arange(data.num_clients))
    for draw in range(4):  # zero variance: the ELBO of every draw equals the log evidence
        terms = program.terms(params, batch.redrawn(draw))
        elbo = -(terms.nll.sum() + terms.local_kl.sum() + terms.global_kl)
        assert elbo.item() == pytest.approx(truth.log_evidence, abs=1e-8)
    d = 2 if case == "means" else 4
    loss = expected(program, params, batch, d)
    for g in torch.autograd.grad(loss, list(params.values()), allow_unused=True):
        assert g is None or (g.tril(-1) if g.dim() > 1 else g).abs().max() < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_the_conditional_guides_local_distribution(case: str) -> None:
    model, make = CASES[case]
    data, truth = make(), exact(make(), case)
    program = read(model, guides.conditional, data)
    batch = full_batch(data, torch.arange(data.num_clients))
    with Substitute(at_truth(program, truth), batch):
        nodes: Any = pyro.poutine.trace(program.guide).get_trace(batch).nodes
    g, own = nodes["g"]["value"].reshape(-1), nodes["_local"]["fn"]
    mean = truth.own_loc + (truth.given_slope @ (g - truth.loc)[:, None])[..., 0]
    assert torch.allclose(own.loc[:, 0], mean, atol=1e-10)
    assert torch.allclose(own.covariance_matrix[:, 0], truth.given_cov, atol=1e-10)
