"""FedPA: the one vector of a product of Gaussians, draws as means of passes, and its reduction to FedAvg."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, Phase
from hierfl.methods import fedpa
from hierfl.methods.posteriors.fedpa import product_gradient
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, B, H, P, at, clients
from tests.programs import federation, fit, row_plan

DRAWS = torch.tensor([[1.0, 0, 2], [0, 1, 1], [2, 1, 0], [1, -1, 1]], dtype=torch.float64)
DRAWING: dict[str, Any] = {"server_optimizer": SGD(1.0), "averaging_rounds": 0}
AT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


ORACLE = {
    0.0: (0.0, 1.75, 2.0),
    0.4: (0.6977346278, 2.4313915858, 3.1398058252),
    1.0: (37 / 27, 80 / 27, 111 / 27),
}


@pytest.mark.parametrize(("rho", "published"), ORACLE.items())
def test_the_oracle_of_four_draws(rho: float, published: tuple[float, ...]) -> None:
    found = product_gradient(3.0 * (DRAWS - AT), torch.tensor(3.0), rho)
    assert found.tolist() == pytest.approx(published, abs=1e-10)


def dense(theta: Tensor, draws: Tensor, rho: float) -> Tensor:
    r = 1.0 / (1.0 + (len(draws) - 1) * rho)
    covariance = r * torch.eye(len(theta)) + (1.0 - r) * torch.cov(draws.T)
    return torch.linalg.solve(covariance, theta - draws.mean(0))


@pytest.mark.parametrize("rho", [0.0, 0.01, 0.5, 10.0])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_it_equals_the_dense_solve(rho: float, count: int) -> None:
    g = torch.Generator().manual_seed(count)
    draws, theta = torch.randn(count, 200, generator=g), torch.randn(200, generator=g)
    sums, steps = 4.0 * (draws - theta), torch.tensor(4.0)
    found = product_gradient(sums, steps, rho)
    assert torch.allclose(found, dense(theta, draws, rho), atol=1e-9, rtol=0.0)
    assert torch.allclose(product_gradient(sums[:1], steps, rho), theta - draws[0])


def line(batch: ClientBatch) -> None:
    w = pyro.param("w", torch.zeros(2))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def test_a_draw_is_the_mean_of_a_pass() -> None:
    lr, rho = 0.1, 0.7
    how: dict[str, Any] = {"epochs": 5, "burn_in": 2, "shrinkage": rho, "batch_size": None}
    method = fedpa(at(START), optimizer=SGD(lr), **DRAWING, **how)
    found = fit(method, clients(), rounds=1).message["theta"]["theta"]
    wanted = START.clone()
    for k in range(3):
        w, draws = START, []
        for _ in range(5):
            w = w - lr * H[k] @ (w - B[k])
            draws.append(w)
        wanted = wanted - P[k] * dense(START, torch.stack(draws[2:]), rho)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_when_draws_begin() -> None:
    server = fit(fedpa(at(START), epochs=2), clients(), rounds=1).federation.server
    flags = [float(server.down(server.state, hierfl.Clock(r, 15))["averaging"]) for r in range(6)]
    assert flags == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], "4 of 15"


def test_draws_of_mini_batches() -> None:
    """Clients with 5 and 1 rows have passes of 3 and 1 mini-batches; each draw is a mean over one pass."""
    data = federation((5, 1))
    lr = 0.1
    method = fedpa(line, epochs=2, burn_in=1, optimizer=SGD(lr), batch_size=2, **DRAWING)
    found = fit(method, data, rounds=1, seed=1).message["theta"]["w"]
    phase = Phase(lambda work, message, batch: work, 2, "epoch", 2)
    index, inside, active = row_plan(data, torch.arange(2), phase, seed=1, at=(0, 0))
    wanted = torch.zeros(2)
    for k, (rows, passes) in enumerate(((5, 3), (1, 1))):
        w, iterates = torch.zeros(2), []
        for t in range(len(index)):
            if not active[t, k]:
                continue
            chosen = index[t, k][inside[t, k]]
            x, y = data.fields["x"][chosen], data.fields["y"][chosen]
            w = w - lr * x.T @ (x @ w - y) / len(y)
            iterates.append(w)
        assert len(iterates) == 2 * passes
        wanted = wanted + rows / 6 * torch.stack(iterates[passes:]).mean(0)
    assert torch.allclose(found, wanted, atol=1e-12)
