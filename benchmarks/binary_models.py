"""Hierarchies of 0/1 labels, from ordinary to hard, and eight schools centered.

* demo: the demo's hierarchy on its 644 training rows, K = 56, centered and non-centered.
* rare_labels, very_rare_labels: 6% and 3% of the labels are positive; several clients have none.
* flipped: a twentieth of one client's labels are flipped.
* separable: one client's rows are separable, so that its likelihood has no maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray

import hierfl
from benchmarks.reference_models import EXACT, SCHOOLS, Draws, Problem, Way
from benchmarks.simulated_models import conditional, generator, simulated, unchanged
from hierfl import ClientBatch, ClientData

# ------------------------------------------------------------------------------------------------
# the demo's
FEATURES = 27


def demo_data() -> ClientData:
    """Return the demo's training rows."""
    return hierfl.datasets.heart_disease().split(0.7, seed=0)[0]


def demo(batch: ClientBatch) -> None:
    """Model y ~ Bernoulli(logit^-1(a_k + x .

    B_k)) with a mean and a scale for each of 28 coefficients.
    """
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.5))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(FEATURES), 2.5).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    t = pyro.sample("t", dist.HalfNormal(0.5 * torch.ones(FEATURES)).to_event(1))
    with batch.clients():
        a = pyro.sample("intercept", dist.Normal(alpha, s))
        b = pyro.sample("slope", dist.Normal(beta, t).to_event(1))
        with batch.data():
            logits = a + (batch.x * b).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def demo_non_centered(batch: ClientBatch) -> None:
    """Model the same, non-centered: intercept = alpha + s e, slope = beta + t f."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.5))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(FEATURES), 2.5).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    t = pyro.sample("t", dist.HalfNormal(0.5 * torch.ones(FEATURES)).to_event(1))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", dist.Normal(torch.zeros(FEATURES), 1.0).to_event(1))
        with batch.data():
            logits = alpha + s * e + (batch.x * (beta + t * f)).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def demo_effects(draws: Draws) -> Draws:
    """Return draws with the hospitals' intercepts and slopes, for a centered or a non-centered program."""
    if "slope" in draws:
        return draws
    intercept = draws["alpha"][:, None] + draws["s"][:, None] * draws["e"]
    slope = draws["beta"][:, None] + draws["t"][:, None] * draws["f"]
    return {**draws, "intercept": intercept, "slope": slope}


def of_demo(name: str, model: Callable[[ClientBatch], None]) -> Problem:
    """Return the demo's hierarchy, written one way."""
    return Problem(
        name,
        "demo_hierarchy",
        demo_data,
        demo_effects,
        demo_non_centered,
        conditional(model),
        ("alpha",),
    )


# ---------------------------------------------------------------------------------- eight schools,
# centered
def schools_centered(batch: ClientBatch) -> None:
    """Model eight schools: y_j ~ Normal(theta_j, sigma_j), theta_j ~ Normal(mu, tau), tau ~ HalfCauchy(5)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(theta, batch.sigma), obs=batch.y)


SCHOOLS_CENTERED = Problem(
    "eight_schools_centered",
    SCHOOLS.source,
    SCHOOLS.data,
    unchanged,
    SCHOOLS.sampled,
    {"conditional": Way(schools_centered, EXACT, 500, 0.05, 8)},
)


# -------------------------------------------------------------------------------------- simulated
# federations
def logistic(batch: ClientBatch, *, columns: int) -> None:
    """Model y ~ Bernoulli(logit^-1(x .

    W_k)), w_k ~ Normal(mu, tau), an intercept among the columns.
    """
    mu = pyro.sample("mu", dist.Normal(torch.zeros(columns), 2.5).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(columns)).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


RARE_COLUMNS, COLUMNS = 10, 4


def rare(batch: ClientBatch) -> None:
    """Model clients of ten coefficients."""
    logistic(batch, columns=RARE_COLUMNS)


def ordinary(batch: ClientBatch) -> None:
    """Model clients of four coefficients."""
    logistic(batch, columns=COLUMNS)


Columns = NDArray[np.float64]


def rows(clients: int, each: int, loc: Columns, scale: Columns, seed: int) -> dict[str, Columns]:
    """Return rows drawn from the logistic hierarchy: client (n,), x (n, D) and y (n,).

    Args:
        clients: number of clients.
        each: rows of each client.
        loc: mean of the clients' coefficients, (D,), the intercept first.
        scale: their standard deviation, (D,).
        seed: of all that is drawn.
    """
    g = generator(seed)
    client = np.repeat(np.arange(clients), each)
    w = g.normal(loc, scale, (clients, len(loc)))
    x = np.concatenate([np.ones((len(client), 1)), g.normal(size=(len(client), len(loc) - 1))], 1)
    chance = 1.0 / (1.0 + np.exp(-(x * w[client]).sum(1)))
    return {"client": client, "x": x, "y": (g.uniform(size=len(client)) < chance).astype(float)}


def grouped(parts: dict[str, Columns]) -> ClientData:
    """Return rows by client."""
    return ClientData.from_arrays(parts["client"], x=parts["x"], y=parts["y"])


def rare_data(intercept: float) -> ClientData:
    """Return 29 clients of 76 rows and ten columns.

    Args:
        intercept: mean of the clients' intercepts: it sets the share of positive labels.
    """
    loc = np.array([intercept, 0.8, -0.6, 0.4, -0.3, 0.2, 0.0, 0.0, 0.0, 0.0])
    scale = np.array([1.2, *[0.3] * (RARE_COLUMNS - 1)])
    return grouped(rows(29, 76, loc, scale, seed=6))


LOC, SCALE = np.array([-0.3, 1.0, -0.7, 0.3]), np.array([0.6, 0.4, 0.4, 0.2])


def flipped_data() -> ClientData:
    """Return 10 clients of 60 rows; 3 labels of the first client are flipped."""
    parts = rows(10, 60, 2.0 * LOC, SCALE, seed=7)
    logits = parts["x"][:60] @ (2.0 * LOC)
    # flipped where they are least likely: these rows pull hardest
    sure = np.argsort(-np.abs(logits))[:3]
    parts["y"][sure] = (logits[sure] < 0.0).astype(float)
    return grouped(parts)


def separable_data() -> ClientData:
    """Return 10 clients of 40 rows.

    A label of the first client is 1 exactly where its second column is positive.
    """
    parts = rows(10, 40, LOC, SCALE, seed=8)
    parts["y"][:40] = (parts["x"][:40, 1] > 0.0).astype(float)
    return grouped(parts)


BINARY = {
    problem.name: problem
    for problem in (
        of_demo("demo", demo),
        of_demo("demo_non_centered", demo_non_centered),
        SCHOOLS_CENTERED,
        simulated("rare_labels", rare, partial(rare_data, -4.35), unchanged, ()),
        simulated("very_rare_labels", rare, partial(rare_data, -5.2), unchanged, ()),
        simulated("flipped", ordinary, flipped_data, unchanged, ()),
        simulated("separable", ordinary, separable_data, unchanged, ()),
    )
}
