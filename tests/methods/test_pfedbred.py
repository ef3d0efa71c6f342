"""pFedBreD: special cases, prox identities of every prior, and each strategy against a loop by hand."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from hierfl import ClientBatch, ClientData, Method, Phase, models
from hierfl.methods import over_relaxed, pfedbred
from hierfl.models import bregman
from hierfl.models.bregman import BregmanPrior
from hierfl.models.bregman_network import BregmanKernel, Means
from hierfl.optimizers import SGD
from tests.methods.cases import net
from tests.methods.quadratics import START, B, H, at, clients
from tests.methods.test_pvi import close
from tests.programs import federation, fit, row_plan

WHOLE: dict[str, Any] = {"batch_size": None}


def paced(model: Any, strategy: Any, prox: float, lr: float, eta: float, **options: Any) -> Method:
    """Return pFedBreD with step sizes `lr` of a client's own weights and `eta` of the common ones."""
    pace: dict[str, Any] = {"optimizer": SGD(lr), "global_optimizer": SGD(eta)}
    return pfedbred(model, strategy, prox=prox, **pace, **options)


def line(batch: ClientBatch) -> None:
    theta = pyro.param("theta", START.clone())
    with batch.clients():
        w = pyro.sample("w", dist.Normal(theta, 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def test_mh_code_takes_a_mini_batch_for_each_gradient() -> None:
    """Against a loop over clients, of 9 rows, of fewer than two mini-batches, and of fewer than one.

    The first is for the gradient ahead; the second for the gradient there, the inner steps and w.
    """
    lam, lr, eta, a, m, size, steps = 2.0, 0.05, 0.1, 0.07, 0.3, 2, 3
    data = federation((9, 3, 1))
    x, y = data.fields["x"], data.fields["y"]

    def slope(rows: Tensor, w: Tensor) -> Tensor:
        return x[rows].T @ (x[rows] @ w - y[rows]) / len(rows)

    theta, kept = START, [(START, START)] * 3  # v, last
    phase = Phase(lambda work, message, batch: work, steps, batch_size=2 * size)
    for round_ in range(2):
        copies = []
        for k in range(3):
            # a plan for the client alone: what others have must not matter
            plan = row_plan(data, torch.tensor([0, k]), phase, seed=4, at=(round_, 0))
            w, (v, last) = theta, kept[k]
            for index, inside, _ in zip(*plan, strict=True):
                rows = index[1][inside[1]]
                second = rows.repeat(2 * size)[size : 2 * size] if len(rows) >= size else rows
                ahead = w - a * slope(rows[:size], w)
                near = w - a * slope(second, ahead)
                mu = near - m * (last - v)
                for _ in range(2):
                    v = v - lr * (slope(second, v) + lam * (v - mu))
                w = near - eta * lam * (mu - v)
            kept[k] = (v, w)
            copies.append(w)
        theta = torch.stack(copies).mean(0)
    how: dict[str, Any] = {"inner_steps": 2, "steps": steps, "batch_size": size}
    method = paced(line, "mh-code", lam, lr, eta, gradient_step_size=a, memory_step_size=m, **how)
    found = fit(method, data, rounds=2, seed=4)
    close(found.message["theta"], theta, 1e-10)
    close(found.draws(1).own["w"][0], torch.stack([v for v, _ in kept]), 1e-10)


@pytest.mark.parametrize("strategy", ["none", "lg", "meg", "mh", "mh24", "mh-code"])
def test_two_rounds_by_hand(strategy: str) -> None:
    """Eq. (14), Eq. (24) and the variant of the authors' code on quadratics; each step takes all rows."""
    lam, lr, eta, a, m, rounds, steps = 2.0, 0.05, 0.1, 0.07, 0.3, 2, 2

    def slope(k: int, w: Tensor) -> Tensor:
        return H[k] @ (w - B[k])

    theta, kept = START, [(START, START)] * 3  # v, last
    for _ in range(rounds):
        copies = []
        for k in range(3):
            w, (v, last) = theta, kept[k]
            for _ in range(steps):
                near = w
                if strategy in ("lg", "mh"):
                    near = w - a * slope(k, w)
                elif strategy in ("mh24", "mh-code"):
                    near = w - a * slope(k, w - a * slope(k, w))
                mu = near - m * (last - v) if strategy not in ("none", "lg") else near
                for _ in range(3):
                    v = v - lr * (slope(k, v) + lam * (v - mu))
                w = (near if strategy == "mh-code" else w) - eta * lam * (mu - v)
            kept[k] = (v, w)
            copies.append(w)
        theta = torch.stack(copies).mean(0)
    how: dict[str, Any] = {"inner_steps": 3, "steps": steps, **WHOLE}
    how |= {"gradient_step_size": a, "memory_step_size": m}
    method = paced(at(START, personal=True), strategy, lam, lr, eta, **how)
    found = fit(method, clients(), rounds=rounds)
    close(found.message["theta"], theta, 1e-10)
    close(found.draws(1).own["w"][0], torch.stack([v for v, _ in kept]), 1e-10)


SLOPE = torch.tensor([0.8, -0.5], dtype=torch.float64)
# prior -> mu, and the prox of a linear loss of slopes c / lam by hand
PROX: dict[str, tuple[list[float], Callable[[Tensor, Tensor], Tensor]]] = {
    "gaussian": ([0.3, -1.0], lambda mu, by: mu - by),
    "bernoulli": ([0.3, 0.6], lambda mu, by: torch.sigmoid(torch.logit(mu) - by)),
    "poisson": ([0.7, 2.0], lambda mu, by: mu * torch.exp(-by)),
    "exponential": ([0.7, 1.5], lambda mu, by: 1.0 / (1.0 / mu + by)),
}
THREE = ClientData.from_clients({k: {"y": torch.zeros(2).double()} for k in "abc"})


def linear_loss(prior: BregmanPrior, mean: Tensor) -> Any:
    """Return a model of which minus log p(y | v) is c . v, with an exact prox under every prior."""

    def model(batch: ClientBatch) -> None:
        theta = pyro.param("theta", mean.double().clone(), constraint=Means(prior))
        with batch.clients():
            v = pyro.sample("v", BregmanKernel(prior, theta))
            with batch.data():
                row = dist.Delta(torch.zeros_like(batch.y), log_density=-(SLOPE * v).sum(-1))
                pyro.sample("y", row, obs=batch.y)

    return model


@pytest.mark.parametrize("name", PROX)
def test_prox_of_a_linear_loss(name: str) -> None:
    """Oracle O7: prox = grad g(s - c / lam)."""
    lam, mean = 4.0, torch.tensor(PROX[name][0])
    prior: BregmanPrior = getattr(bregman, name)()
    how: dict[str, Any] = {"inner_steps": 50, "steps": 1, **WHOLE}
    method = paced(linear_loss(prior, mean), "none", lam, 0.1, 0.05, **how)
    fitted = fit(method, THREE, rounds=1)
    expected = prior.mean_of(prior.natural_of(mean) - SLOPE / lam)
    assert torch.allclose(expected, PROX[name][1](mean, SLOPE / lam), atol=1e-12)
    assert torch.allclose(fitted.draws(1).own["v"][0], expected.expand(3, 2), atol=1e-7)
    moved = prior.natural_of(mean) - 0.05 * lam * (mean - expected)
    assert torch.allclose(fitted.message["theta"], moved, atol=1e-7), "s <- s - eta lam (mu - v)"


def test_prox_under_a_custom_g_that_couples_components() -> None:
    """g(s) = s' C s / 2; the prior of two clients is two tensors and not one of four numbers."""
    cov, mean, lam = torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.tensor(PROX["gaussian"][0]), 4.0
    back = torch.linalg.inv(cov)
    prior = BregmanPrior(
        lambda s: 0.5 * s @ cov @ s, gradient=lambda s: cov @ s, inverse=lambda x: back @ x
    )
    how: dict[str, Any] = {"memory_step_size": 0.0, "inner_steps": 50, "steps": 1, **WHOLE}
    method = paced(linear_loss(prior, mean), "mh", lam, 0.1, 0.05, **how)
    fitted = fit(method, THREE, rounds=1)
    mu = mean - cov @ (0.01 * SLOPE)  # a step of 0.01 in natural parameters
    close(fitted.draws(1).own["v"][0], (mu - cov @ SLOPE / lam).expand(3, 2), 1e-7)
    close(fitted.message["theta"], back @ mean - 0.05 * cov @ SLOPE, 1e-7)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "exponential"])
def test_values_stay_in_their_domain(name: str) -> None:
    prior: BregmanPrior = getattr(bregman, name)()
    model = models.bregman_network(net(), prior, likelihood=models.likelihood.normal(1.0))
    method = paced(model, "mh", 2.0, 0.02, 0.3, steps=3, batch_size=2, inner_steps=2)
    fitted = fit(over_relaxed(method), federation((5, 3, 7)), rounds=2)
    for value in fitted.draws(1).own.values():
        assert bool(prior.mean.check(value).all())
    assert all(bool(prior.natural.check(v).all()) for v in fitted.message.values())
