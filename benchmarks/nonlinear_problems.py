"""Hard problems whose rows depend on the sites by a network or a differential equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.textbook_problems import named, of_rows
from hierfl import ClientBatch, ClientData

PREY, PREDATORS, STEPS, EVERY = 30.0, 6.0, 40, 4  # at the start; steps of 0.25, a row every 4th
HIDDEN = 4  # units of the network


def network(clients: int = 8, rows: int = 30) -> tuple[Any, ClientData]:
    """Return a Bayesian network of one hidden layer, whose intercept is each client's own."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, clients * rows)
    own = np.repeat(0.3 * rng.standard_normal(clients), rows)
    y = np.sin(1.5 * x) + own + 0.2 * rng.standard_normal(len(x))

    def model(batch: ClientBatch) -> None:
        slope, bias, out = (
            pyro.sample(n, dist.Normal(torch.zeros(HIDDEN), 1.0).to_event(1))[..., None, :]
            for n in ("slope", "bias", "out")
        )
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with batch.clients():
            shift = pyro.sample("shift", dist.Normal(0.0, spread))
            with batch.data():
                hidden = torch.tanh(slope * batch.x[..., None] + bias)
                loc = shift + (hidden * out).sum(-1)
                pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)

    return model, of_rows(named(clients), rows, x=x, y=y)


def _populations(rates: Tensor) -> Tensor:
    """Return log numbers of prey and predators at each row, by Runge-Kutta's steps."""
    alpha, beta, gamma, delta = rates.unbind(-1)
    step, states = 0.25, []
    state = torch.stack([PREY * torch.ones_like(alpha), PREDATORS * torch.ones_like(alpha)])

    def change(of: Tensor) -> Tensor:
        u, v = of
        return torch.stack([(alpha - beta * v) * u, (delta * u - gamma) * v])

    for i in range(STEPS):
        first = change(state)
        second = change(state + 0.5 * step * first)
        third = change(state + 0.5 * step * second)
        fourth = change(state + step * third)
        state = state + step / 6.0 * (first + 2.0 * second + 2.0 * third + fourth)
        if (i + 1) % EVERY == 0:
            states.append(state.clamp(min=1e-6).log())
    return torch.stack(states, -1)


def lotka_volterra(places: int = 6) -> tuple[Any, ClientData]:
    """Return prey and predators of six places by Lotka and Volterra's equations, as Stan's lynx."""
    g = torch.Generator().manual_seed(0)
    middle = torch.tensor([0.55, 0.028, 0.8, 0.024]).log()
    own = (middle + 0.1 * torch.randn(places, 4, generator=g)).exp()
    rows = STEPS // EVERY
    u, v = _populations(own) + 0.2 * torch.randn(2, places, rows, generator=g)
    at = torch.eye(rows).repeat(places, 1)

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(middle, 0.5).to_event(1))
        spread = pyro.sample("spread", dist.HalfNormal(0.3 * torch.ones(4)).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(0.5))
        with batch.clients():
            rates = pyro.sample("rates", dist.LogNormal(mu, spread).to_event(1))
            prey, predators = _populations(rates)
            with batch.data():
                at_row = ((batch.at * of).sum(-1) for of in (prey, predators))
                for name, loc in zip(("u", "v"), at_row, strict=True):
                    pyro.sample(name, dist.Normal(loc, noise), obs=getattr(batch, name))

    return model, of_rows(named(places), rows, at=at, u=u.reshape(-1), v=v.reshape(-1))


NONLINEAR: dict[str, Callable[[], tuple[Any, Any]]] = {
    "small_network": network,
    "lotka_volterra": lotka_volterra,
}
