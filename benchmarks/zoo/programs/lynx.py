"""Prey and predators of six places by Lotka and Volterra's equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Stan, Lotka-Volterra, with rates of each place"
IDIOM = "a differential equation by steps, local rates"
PREY, PREDATORS, STEPS, EVERY = 30.0, 6.0, 40, 4  # at the start; steps of 0.25, a row every 4th
MIDDLE = (-0.5978, -3.5756, -0.2231, -3.7297)  # logs of the rates 0.55, 0.028, 0.8 and 0.024


def rows() -> dict[str, Any]:
    """Return log numbers of both kinds at ten times, and the time of each row as a one-hot vector."""
    g = torch.Generator().manual_seed(0)
    rates = (torch.tensor(MIDDLE) + 0.1 * torch.randn(6, 4, generator=g)).exp()
    noise = 0.2 * torch.randn(2, 6, STEPS // EVERY, generator=g)
    u, v = (populations(rates) + noise).reshape(2, -1).numpy()
    at = np.tile(np.eye(STEPS // EVERY), (6, 1))
    return {"client": np.repeat(np.arange(6), STEPS // EVERY), "at": at, "u": u, "v": v}


def populations(rates: Any) -> Any:
    """Return log numbers of prey and predators, (2, ..., rows), of rates (..., 4)."""
    state, states = start(rates), []
    for i in range(STEPS):
        state = after_step(state, rates)
        if (i + 1) % EVERY == 0:
            states.append(torch.log(state.clip(min=1e-6)))
    return torch.stack(states, -1)


def start(rates: Any) -> Any:
    """Return the numbers of both kinds before the first step, (2, ...)."""
    ones = torch.ones_like(rates[..., 0])
    return torch.stack([PREY * ones, PREDATORS * ones])


def after_step(state: Any, rates: Any, step: float = 0.25) -> Any:
    """Return the numbers after a step of Runge and Kutta's fourth order, (2, ...)."""
    alpha, beta, gamma, delta = (rates[..., k] for k in range(4))

    def change(of: Any) -> Any:
        u, v = of[0], of[1]
        return torch.stack([(alpha - beta * v) * u, (delta * u - gamma) * v])

    first = change(state)
    second = change(state + 0.5 * step * first)
    third = change(state + 0.5 * step * second)
    fourth = change(state + step * third)
    return state + step / 6.0 * (first + 2.0 * second + 2.0 * third + fourth)


def model(batch: Any) -> None:
    """Rates of places are log-normal about common ones."""
    mu, spread, noise = scales()
    with batch.clients():
        rates = pyro.sample("rates", dist.LogNormal(mu, spread).to_event(1))
        observe(batch, populations(rates), noise)


def for_numpyro(batch: Any) -> None:
    """The same: XLA compiles a loop of steps, and takes minutes for 40 of them one after the other."""
    import jax

    mu, spread, noise = scales()
    with batch.clients():
        raw = pyro.sample("raw", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        rates = pyro.deterministic("rates", torch.exp(mu + spread * raw))

        def step(state: Any, _: Any) -> Any:
            state = after_step(state, rates)
            return state, state

        _, states = jax.lax.scan(step, start(rates), None, length=STEPS)
        by_row = torch.log(states[EVERY - 1 :: EVERY].clip(min=1e-6))
        observe(batch, torch.moveaxis(by_row, 0, -1), noise)


def scales() -> tuple[Any, Any, Any]:
    """Sample the middle and the spread of log rates, and the noise of rows."""
    mu = pyro.sample("mu", dist.Normal(torch.tensor(MIDDLE), 0.5).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(0.3 * torch.ones(4)).to_event(1))
    return mu, spread, pyro.sample("noise", dist.HalfNormal(0.5))


def observe(batch: Any, populations: Any, noise: Any) -> None:
    """Sample the rows of both kinds, log numbers (2, ..., rows) of each place."""
    with batch.data():
        for name, of in zip(("u", "v"), populations, strict=True):
            pyro.sample(name, dist.Normal((batch.at * of).sum(-1), noise), obs=getattr(batch, name))
