"""Closed forms across methods: EM, limits of the toy, and envelopes."""

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import softplus

import hierfl
from hierfl import ClientBatch, ClientData, Method, Phase, ProgramError, guides
from hierfl.core.trees import Tree
from hierfl.methods import fedabml, pfedbred
from hierfl.methods.parts.averaging import TwoLevels
from hierfl.models import bregman
from hierfl.models.bregman import BregmanPrior
from hierfl.models.bregman_network import BregmanKernel, Means
from hierfl.optimizers import SGD
from tests.methods.quadratics import ALL_ROWS, I2, START, at, clients, observed
from tests.programs import fit

# n_k H_k, diagonal, and the clients' own minima
CURVES = torch.tensor([[4.0, 9.0], [10.0, 3.0], [1.5, 6.0], [6.0, 2.0]], dtype=torch.float64)
BEST = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [2.0, -0.5]], dtype=torch.float64)


def diagonal() -> ClientData:
    """Four clients of two rows whose summed loss is sum_j h_j (w_j - b_j)^2 / 2."""
    roots = torch.diag_embed((CURVES / 2.0).sqrt())
    rows = {
        k: {"factor": r.expand(2, 2, 2), "y": (r @ b).expand(2, 2)}
        for k, r, b in zip("abcd", roots, BEST, strict=True)
    }
    return ClientData.from_clients(rows)


def learned_prior(batch: ClientBatch) -> None:
    m = pyro.param("m", torch.tensor([0.5, -0.5]))
    s = pyro.param("s", torch.tensor([0.7, 0.4]), constraint=dist.constraints.softplus_positive)
    with batch.clients():
        observed(batch, pyro.sample("w", dist.Normal(m, s).to_event(1)))


def solved(base: Method) -> Method:
    """Replace the method's gradient steps by the client's exact posterior given its rows and the message."""

    def client(program: hierfl.Program) -> Any:
        def solve(lane: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            factor = batch.factor.diagonal(dim1=-2, dim2=-1)
            within = softplus(message["s"]) ** -2.0
            precision = factor.square().sum(1) + within
            loc = ((factor * batch.y).sum(1) + message["m"] * within) / precision
            phi = {"w.loc": loc, "w.scale": precision.rsqrt().expm1().log()}
            phi = {name: value.view(1, 1, 2) for name, value in phi.items()}
            return lane._replace(phi=lane.phi._replace(params=phi))

        return replace(base.client(program), phases=(Phase(solve),))

    return replace(base, client=client)


def em(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return one EM step for b_k ~ Normal(w_k, 1 / h_k), w_k ~ Normal(m, s^2)."""
    precision = CURVES + s**-2.0
    loc = (CURVES * BEST + m * s**-2.0) / precision
    return loc.mean(0), (1.0 / precision + (loc - loc.mean(0)).square()).mean(0).sqrt()


def evidence(m: Tensor, s: Tensor) -> float:
    return float(dist.Normal(m, (1.0 / CURVES + s.square()).sqrt()).log_prob(BEST).sum())


def test_o3_with_exact_clients_and_the_exact_server_it_equals_em() -> None:
    method = solved(fedabml(learned_prior, server="exact"))
    few = fit(method, diagonal(), rounds=3).message
    m, s = torch.tensor([0.5, -0.5]), torch.tensor([0.7, 0.4])
    for _ in range(3):
        before = evidence(m, s)
        m, s = em(m, s)
        assert evidence(m, s) > before
    assert torch.allclose(few["m"], m, atol=1e-10, rtol=0.0)
    assert torch.allclose(softplus(few["s"]), s, atol=1e-10, rtol=0.0)


def test_the_exact_server_averages_points_and_refuses_unsupported_priors() -> None:
    options: dict[str, Any] = {**ALL_ROWS, "steps": 2, "server": "exact", "optimizer": SGD(0.05)}
    fitted = fit(fedabml(at(START, personal=True), guides.delta, **options), clients(), rounds=1)
    assert torch.allclose(fitted.message["theta"], fitted.draws(1).own["w"][0].mean(0), atol=1e-12)
    with pytest.raises(ProgramError, match=r"the prior's scale of site 'w' is neither known nor"):
        fit(fedabml(lambda batch: _scaled(batch), **options), clients(), rounds=1)


def _scaled(batch: ClientBatch) -> None:
    """A model whose prior scale is a function of a param: one value for two components."""
    m, s = pyro.param("m", torch.zeros(2)), pyro.param("s", torch.tensor(0.0))
    with batch.clients():
        observed(batch, pyro.sample("w", dist.Normal(m, s.exp()).to_event(1)))


AT, BOTTOM, CURVE = torch.tensor([[0.3, 0.6], [0.8, 0.4], [0.9, 2.5]], dtype=torch.float64)
PRIORS: dict[str, BregmanPrior] = {
    "gaussian": bregman.gaussian(),
    "gaussian of a precision": bregman.gaussian(2.5),
    "bernoulli": bregman.bernoulli(),
    "poisson": bregman.poisson(),
    "exponential": bregman.exponential(),
    "one's own": BregmanPrior(torch.cosh, gradient=torch.sinh, inverse=torch.asinh),
}


def square(prior: BregmanPrior, mean: Tensor) -> Any:
    """Return a model whose mean loss is CURVE (v - y)^2 / 2, with one v per client near mu."""

    def model(batch: ClientBatch) -> None:
        mu = pyro.param("mu", mean.clone(), constraint=Means(prior))
        with batch.clients():
            v = pyro.sample("v", BregmanKernel(prior, mu))
            with batch.data():
                pyro.sample("y", dist.Normal(v, CURVE.rsqrt()).to_event(1), obs=batch.y)

    return model


def envelope_of(prior: BregmanPrior, s: Tensor, lam: float) -> float:
    """Return min_v f(v) + lam D(v, grad g(s)) by scipy, summed over components."""
    bounded = prior.mean is dist.constraints.unit_interval
    low = 1e-9 if bounded or prior.mean is dist.constraints.positive else -5.0
    bounds, total = (low, 1.0 - 1e-9 if bounded else 5.0), 0.0
    for h, b, mu in zip(CURVE, BOTTOM, prior.mean_of(s), strict=True):

        def loss(v: float, h: Tensor = h, b: Tensor = b, mu: Tensor = mu) -> float:
            x = torch.tensor([v])
            return float(0.5 * h * (v - b) ** 2 + lam * prior.divergence(x, mu[None]))

        total += minimize_scalar(loss, bounds=bounds, options={"xatol": 1e-9}).fun
    return total


@pytest.mark.parametrize("name", PRIORS)
def test_o7_a_step_descends_the_envelope(name: str) -> None:
    """With an exact prox, s <- s - eta dF/ds, where dF/ds = lam (mu - prox).

    The derivative is checked by central differences of F itself.
    """
    prior, lam, eta, h = PRIORS[name], 4.0, 0.05, 1e-4
    s = prior.natural_of(AT)
    ahead, behind = (
        torch.tensor([envelope_of(prior, s + d, lam) for d in by * I2]) for by in (h, -h)
    )
    slope = (ahead - behind) / (2 * h)
    data = ClientData.from_clients(
        {k: {"y": BOTTOM.expand(n, 2)} for k, n in {"a": 2, "b": 3}.items()}
    )
    how: dict[str, Any] = {"optimizer": SGD(0.15), "global_optimizer": SGD(eta), "inner_steps": 35}
    method = pfedbred(square(prior, AT), "none", prox=lam, steps=1, batch_size=None, **how)
    found = fit(method, data, rounds=1).message["mu"]
    assert torch.allclose(found, s - eta * slope, atol=2e-7)
