"""Simulated hierarchies beyond the linear and the logistic one, each drawn from its own program with a seed.

Their references are pooled NUTS of the same program (`benchmarks.pooled_nuts`). All programs are
centered: a local site is the client's own effect.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.reference_models import Draws, Problem, Way
from hierfl import ClientBatch, ClientData, guides
from hierfl.program.sites import Model

Array = NDArray[np.float64]
NEWTON = guides.conditional(newton_steps=3)


def generator(seed: int) -> np.random.Generator:
    """Return a generator whose numbers are the same on every machine."""
    return np.random.Generator(np.random.Philox(seed))


def conditional(model: Model) -> dict[str, Way]:
    """Return the one way in which fedsvi fits a simulated problem."""
    return {"conditional": Way(model, NEWTON, 400, 0.05, 2, draws=2000)}


def simulated(name: str, model: Model, data: Any, effects: Any, dense: tuple[str, ...]) -> Problem:
    """Return a problem whose reference is pooled NUTS of its one program."""
    return Problem(name, None, data, effects, model, conditional(model), dense)


def unchanged(draws: Draws) -> Draws:
    """Return the draws: the reference has the program's own sites."""
    return draws


# ------------------------------------------------------------------------------------- Poisson with
# offsets
def poisson_data(
    clients: int = 30, *, fewest: int = 5, most: int = 30, seed: int = 1
) -> ClientData:
    """Return counts with exposures of 0.5 to 20, and two columns.

    Args:
        clients: number of clients.
        fewest: rows of the smallest client.
        most: rows of the largest client.
        seed: of the numbers of rows, the columns and the counts.
    """
    return poisson_federation(clients, fewest=fewest, most=most, seed=seed)[0]


def poisson_federation(
    clients: int, *, fewest: int, most: int, seed: int
) -> tuple[ClientData, dict[str, Array]]:
    """Return `poisson_data`, and the value of each site that the counts were drawn at."""
    g = generator(seed)
    client = np.repeat(np.arange(clients), g.integers(fewest, most + 1, clients))
    truth = {
        "mu": np.array(-0.5),
        "tau": np.array(0.6),
        "slope": np.array([0.4, -0.3]),
        "a": g.normal(-0.5, 0.6, clients),
    }
    x, exposure = g.normal(size=(len(client), 2)), np.exp(g.uniform(-0.7, 3.0, len(client)))
    y = g.poisson(exposure * np.exp(truth["a"][client] + x @ truth["slope"]))
    # equally long names, so that clients sorted by name are in the order of `truth`
    names = [f"client {k:05d}" for k in range(clients)]
    data = ClientData.from_arrays(
        client, names=names, x=x, exposure=exposure, y=y.astype(np.float64)
    )
    return data, truth


def poisson(batch: ClientBatch) -> None:
    """Model y ~ Poisson(exposure exp(a_k + x . slope)), a_k ~ Normal(mu, tau)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            rate = batch.exposure * (a + batch.x @ slope).exp()
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)


# ----------------------------------------------------------------------------------------- negative
# binomial
def negative_binomial_data() -> ClientData:
    """Return 1,105 counts of 40 clients, overdispersed.

    Their variance is m + m^2 / 1.5 at a mean of m.
    """
    g = generator(2)
    client = np.repeat(np.arange(40), g.integers(10, 51, 40))
    x = g.normal(size=(len(client), 2))
    mean = np.exp(g.normal(1.0, 0.7, 40)[client] + x @ np.array([0.5, -0.2]))
    y = g.poisson(mean * g.gamma(1.5, 1.0 / 1.5, len(client)))
    return ClientData.from_arrays(client, x=x, y=y.astype(np.float64))


def negative_binomial(batch: ClientBatch) -> None:
    """Model counts of mean m = exp(a_k + x .

    Slope) and variance m + m^2 / shape, with unknown shape.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    shape = pyro.sample("shape", dist.Gamma(2.0, 0.5))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            logits = a + batch.x @ slope - shape.log()
            pyro.sample("y", dist.NegativeBinomial(shape, logits=logits), obs=batch.y)


# -------------------------------------------------------------------------------------------------
# Student t
def student_t_data() -> ClientData:
    """Return 654 rows of 40 clients whose errors are 0.5 times a Student t with 3 degrees of freedom."""
    g = generator(3)
    client = np.repeat(np.arange(40), g.integers(5, 26, 40))
    x = g.normal(size=(len(client), 2))
    y = g.normal(0.5, 0.8, 40)[client] + x @ np.array([1.0, -0.5])
    return ClientData.from_arrays(client, x=x, y=y + 0.5 * g.standard_t(3.0, len(client)))


def student_t(batch: ClientBatch) -> None:
    """Model y ~ StudentT(freedom, a_k + x . slope, sigma), freedom and sigma unknown."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.StudentT(freedom, a + batch.x @ slope, sigma), obs=batch.y)


# ---------------------------------------------------------------- intercepts and slopes with an LKJ
# prior
TRIANGLE = ((1, 0), (2, 0), (2, 1))  # below the diagonal of a 3 x 3 matrix


def lkj_data() -> ClientData:
    """Return 30 clients of 8 to 20 rows.

    Their intercept and two slopes are correlated by 0.6, -0.3 and 0.2.
    """
    g = generator(4)
    client = np.repeat(np.arange(30), g.integers(8, 21, 30))
    sd = np.array([1.0, 0.6, 0.4])
    correlation = np.array([[1.0, 0.6, -0.3], [0.6, 1.0, 0.2], [-0.3, 0.2, 1.0]])
    w = g.multivariate_normal(np.array([0.5, 1.0, -0.5]), np.outer(sd, sd) * correlation, 30)
    x = np.concatenate([np.ones((len(client), 1)), g.normal(size=(len(client), 2))], 1)
    return ClientData.from_arrays(
        client, x=x, y=(x * w[client]).sum(1) + 0.7 * g.normal(size=len(client))
    )


def lkj(batch: ClientBatch) -> None:
    """Model y ~ Normal(x . w_k, sigma), w_k ~ Normal(mu, D R D), D = diag(tau), R ~ LKJ(2)."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(3)).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(3, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=tau[:, None] * root))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), sigma), obs=batch.y)


def lkj_effects(draws: Draws) -> Draws:
    """Return draws with the three correlations in place of the correlation matrix's root."""
    root = draws["root"]
    matrix = root @ root.mT
    correlation = torch.stack([matrix[:, i, j] for i, j in TRIANGLE], -1)
    return {**{s: v for s, v in draws.items() if s != "root"}, "correlation": correlation}


# --------------------------------------------------------------------------------------------- the
# horseshoe
COLUMNS, RELEVANT = 12, 3
# The prior's guess of the relevant columns: Piironen and Vehtari (2017), section 3.3, with sigma =
# 1.
SPREAD = RELEVANT / (COLUMNS - RELEVANT) / math.sqrt(400.0)
SLAB_FREEDOM, SLAB_SCALE = 4.0, 2.0


def horseshoe_data() -> ClientData:
    """Return 400 rows of 20 clients and 12 columns, of which 3 matter."""
    g = generator(5)
    client = np.repeat(np.arange(20), 20)
    x = g.normal(size=(len(client), COLUMNS))
    beta = np.zeros(COLUMNS)
    beta[:RELEVANT] = [1.0, -0.7, 0.3]
    y = g.normal(0.5, 0.7, 20)[client] + x @ beta + g.normal(size=len(client))
    return ClientData.from_arrays(client, x=x, y=y)


def horseshoe(batch: ClientBatch) -> None:
    """Model y ~ Normal(a_k + x . beta, sigma) with a regularized horseshoe on beta.

    beta_j ~ Normal(0, spread l_j), l_j^2 = slab own_j^2 / (slab + spread^2 own_j^2), own_j ~
    HalfCauchy(1): Piironen and Vehtari (2017, arXiv:1707.01694), equation 2.8, with slab = c^2.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    spread = pyro.sample("spread", dist.HalfCauchy(torch.tensor(SPREAD)))
    own = pyro.sample("own", dist.HalfCauchy(torch.ones(COLUMNS)).to_event(1))
    half = SLAB_FREEDOM / 2.0
    slab = pyro.sample("slab", dist.InverseGamma(half, half * SLAB_SCALE**2))
    scale = (slab / (slab + (spread * own) ** 2)).sqrt() * own * spread
    beta = pyro.sample("beta", dist.Normal(0.0, scale).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a + batch.x @ beta, sigma), obs=batch.y)


def horseshoe_effects(draws: Draws) -> Draws:
    """Return draws with the logarithms of spread, own and slab, whose own means need not exist."""
    logs: dict[str, Tensor] = {f"log_{s}": draws[s].log() for s in ("spread", "own", "slab")}
    return {**{s: v for s, v in draws.items() if f"log_{s}" not in logs}, **logs}


SIMULATED = {
    problem.name: problem
    for problem in (
        simulated("poisson", poisson, poisson_data, unchanged, ("mu", "slope")),
        simulated(
            "negative_binomial", negative_binomial, negative_binomial_data, unchanged, ("mu",)
        ),
        simulated("student_t", student_t, student_t_data, unchanged, ("mu",)),
        simulated("lkj", lkj, lkj_data, lkj_effects, ("mu",)),
        simulated("horseshoe", horseshoe, horseshoe_data, horseshoe_effects, ()),
    )
}
