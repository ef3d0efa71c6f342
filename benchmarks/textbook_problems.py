"""Small programs of textbooks and of BUGS's, Stan's, Pyro's and brms's pages, which are hard to fit.

Each is a function of no arguments that returns a program or formula and its rows. Where a book's
data do not ship they are simulated, with as many clients and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl import ClientBatch, ClientData

VAGUE = 1e3  # sd of BUGS's N(0, 1e-6), in precisions
HITS = (18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7)
# BUGS's lsat: how many of 1,000 students have each pattern of five answers, cumulated
PATTERNS = np.array(
    "3 9 11 22 23 24 27 31 32 40 40 56 56 59 61 76 86 115 129 210 213 241 256 336 352 408 429 602 613"
    " 674 702 1000".split(),
    int,
)
SEEDS = (10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3)
SOWN = (39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7)
EXTRACT = (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1)
# BUGS's equiv: log times of ten people with two tablets
FIRST = (1.40, 1.64, 1.44, 1.36, 1.65, 1.08, 1.09, 1.25, 1.25, 1.30)
SECOND = (1.65, 1.57, 1.58, 1.68, 1.69, 1.31, 1.43, 1.44, 1.39, 1.52)
ORDER = (1, 1, -1, -1, -1, 1, 1, 1, -1, -1)
THRESHOLDS = (-1.9, -1.2, -0.7, 0.2, 0.9, 1.8)  # of trolley's seven answers


def named(count: int, prefix: str = "c") -> list[str]:
    """Return names of clients."""
    return [f"{prefix}{i:04d}" for i in range(count)]


def of_rows(names: list[str], rows: int, **fields: Any) -> ClientData:
    """Return data of clients with so many rows each."""
    columns: dict[str, Any] = {
        n: torch.as_tensor(np.asarray(v), dtype=torch.float32) for n, v in fields.items()
    }
    return ClientData.from_arrays([name for name in names for _ in range(rows)], **columns)


def lsat() -> tuple[Any, ClientData]:
    """Return BUGS's lsat: a Rasch model of 1,000 students and five questions."""
    pattern = np.searchsorted(PATTERNS, np.arange(1000), side="right")
    right = (pattern[:, None] >> np.arange(4, -1, -1)) & 1

    def model(batch: ClientBatch) -> None:
        alpha = pyro.sample("alpha", dist.Normal(torch.zeros(5), 100.0).to_event(1))
        beta = pyro.sample("beta", dist.HalfNormal(100.0))
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            with batch.data():
                logits = beta * theta - (alpha[..., None, :] * batch.item).sum(-1)
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)

    item = np.tile(np.eye(5), (1000, 1))
    return model, of_rows(named(1000), 5, item=item, y=right.reshape(-1))


def equiv() -> tuple[Any, ClientData]:
    """Return BUGS's equiv: a crossover trial of ten people, with vague priors."""

    def model(batch: ClientBatch) -> None:
        mu, phi, pi = (pyro.sample(n, dist.Normal(0.0, VAGUE)) for n in ("mu", "phi", "pi"))
        tau1 = pyro.sample("tau1", dist.Gamma(0.001, 0.001))
        tau2 = pyro.sample("tau2", dist.Gamma(0.001, 0.001))
        with batch.clients():
            delta = pyro.sample("delta", dist.Normal(0.0, tau2.rsqrt()))
            with batch.data():
                loc = mu + 0.5 * (batch.treat * phi + batch.period * pi) + delta
                pyro.sample("y", dist.Normal(loc, tau1.rsqrt()), obs=batch.y)

    period = np.tile([1.0, -1.0], 10)
    treat = np.repeat(ORDER, 2) * period
    y = np.stack([FIRST, SECOND], 1).reshape(-1)
    return model, of_rows(named(10), 2, treat=treat, period=period, y=y)


def bones() -> tuple[Any, ClientData]:
    """Return a model as BUGS's bones: ages of 13 children by 34 graded signs of known difficulty."""
    rng = np.random.default_rng(0)
    slope, low = rng.uniform(0.5, 3.0, 34), rng.uniform(0.0, 16.0, 34)
    gap, age = rng.uniform(0.5, 3.0, 34), rng.uniform(1.0, 18.0, 13)
    at = age[:, None] - np.stack([low, low + gap], 0)[:, None]
    grade = (rng.random((13, 34)) < 1.0 / (1.0 + np.exp(-slope * at))).cumprod(0).sum(0)

    def model(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, VAGUE))
        sd = pyro.sample("sd", dist.HalfCauchy(10.0))
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(mu, sd))
            with batch.data():
                first, second = (
                    torch.sigmoid(batch.slope * (theta - batch.low - step))
                    for step in (0.0, batch.gap)
                )
                p = torch.stack([1.0 - first, first - first * second, first * second], -1)
                pyro.sample("grade", dist.Categorical(p), obs=batch.grade)

    columns = {n: np.tile(v, 13) for n, v in (("slope", slope), ("low", low), ("gap", gap))}
    return model, of_rows(named(13), 34, grade=grade.reshape(-1), **columns)


def trolley(people: int = 331, answers: int = 30) -> tuple[Any, pd.DataFrame]:
    """Return answers of one to seven by three properties of a story and the person (McElreath)."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(people), answers)
    x = rng.integers(2, size=(len(person), 3)).astype(float)
    eta = x @ [-0.7, -0.7, -0.95] + 1.9 * rng.standard_normal(people)[person]
    latent = eta + rng.logistic(size=len(person))
    frame = pd.DataFrame(x, columns=["action", "intention", "contact"])
    frame["answer"] = 1 + (latent[:, None] > THRESHOLDS).sum(1)
    frame["person"] = [f"p{i:03d}" for i in person]
    text = "answer ~ action + intention + contact + (1 | person)"
    return hierfl.formula(text, "cumulative", clients="person"), frame


def oxford(tables: int = 120) -> tuple[Any, ClientData]:
    """Return a model as BUGS's oxford: 120 tables with a vague baseline and an odds ratio each."""
    rng = np.random.default_rng(0)
    year = rng.integers(-10, 11, tables).astype(float)
    base = rng.normal(-0.5, 0.7, tables)
    psi = 0.57 - 0.04 * year + 0.007 * (year**2 - 22.0) + 0.18 * rng.standard_normal(tables)
    n = rng.integers(30, 120, (tables, 2))
    logits = base[:, None] + psi[:, None] * [1.0, 0.0]
    r = rng.binomial(n, 1.0 / (1.0 + np.exp(-logits)))

    def model(batch: ClientBatch) -> None:
        alpha, b1, b2 = (pyro.sample(n, dist.Normal(0.0, VAGUE)) for n in ("alpha", "b1", "b2"))
        tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, VAGUE))
            b = pyro.sample("b", dist.Normal(0.0, tau.rsqrt()))
            with batch.data():
                psi = alpha + b1 * batch.year + b2 * (batch.year**2 - 22.0) + b
                logits = mu + psi * batch.exposed
                pyro.sample("r", dist.Binomial(batch.n, logits=logits), obs=batch.r)

    columns = {"year": np.repeat(year, 2), "exposed": np.tile([1.0, 0.0], tables)}
    return model, of_rows(named(tables), 2, n=n.reshape(-1), r=r.reshape(-1), **columns)


def seeds() -> tuple[Any, ClientData]:
    """Return BUGS's seeds: germination on 21 plates, one row each."""

    def model(batch: ClientBatch) -> None:
        a0, a1, a2, a12 = (
            pyro.sample(n, dist.Normal(0.0, VAGUE)) for n in ("a0", "a1", "a2", "a12")
        )
        tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
        with batch.clients():
            b = pyro.sample("b", dist.Normal(0.0, tau.rsqrt()))
            with batch.data():
                logits = (
                    a0 + a1 * batch.kind + a2 * batch.extract + a12 * batch.kind * batch.extract + b
                )
                pyro.sample("r", dist.Binomial(batch.n, logits=logits), obs=batch.r)

    kind = [0.0] * 11 + [1.0] * 10
    return model, of_rows(named(21), 1, r=SEEDS, n=SOWN, kind=kind, extract=EXTRACT)


def baseball() -> tuple[Any, ClientData]:
    """Return Pyro's baseball, partially pooled: hits of 18 players in their first 45 at bats."""

    def model(batch: ClientBatch) -> None:
        m = pyro.sample("m", dist.Uniform(0.0, 1.0))
        kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
        with batch.clients():
            phi = pyro.sample("phi", dist.Beta(m * kappa, (1.0 - m) * kappa))
            with batch.data():
                pyro.sample("hits", dist.Binomial(45, phi), obs=batch.hits)

    return model, of_rows(named(18), 1, hits=HITS)


def immunized(communities: int = 161) -> tuple[Any, pd.DataFrame]:
    """Return yes or no of children of mothers of communities, as mlmRev's guImmun."""
    rng = np.random.default_rng(0)
    mothers = rng.integers(3, 17, communities)
    community = np.repeat(np.arange(communities), mothers)
    mother = np.repeat(np.arange(len(community)), rng.integers(1, 3, len(community)))
    place = community[mother]
    older, rural = (rng.random(len(mother)) < 0.7), (np.arange(communities) % 3 > 0)[place]
    eta = -0.8 + 1.7 * older - 0.5 * rural + 0.8 * rng.standard_normal(communities)[place]
    eta = eta + 1.5 * rng.standard_normal(len(community))[mother]
    y = (rng.random(len(eta)) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    of = {"y": y, "older": older.astype(float), "rural": rural.astype(float)}
    frame = pd.DataFrame({**of, "comm": place, "mom": [f"m{i:04d}" for i in mother]})
    text = "y ~ older + rural + (1 | comm) + (1 | mom)"
    return hierfl.formula(text, "bernoulli", clients="comm"), frame


def curves(patients: int = 80, visits: int = 8) -> tuple[Any, pd.DataFrame]:
    """Return a marker of 80 patients about a Gaussian process of the day, with Gamma rows."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(patients), visits)
    day = rng.uniform(0.0, 30.0, len(patient))
    eta = np.sin(day / 5.0) + 0.4 * rng.standard_normal(patients)[patient]
    frame = pd.DataFrame({"day": day, "patient": [f"p{i:02d}" for i in patient]})
    frame["marker"] = rng.gamma(5.0, np.exp(eta) / 5.0)
    return hierfl.formula("marker ~ gp(day) + (1 | patient)", "gamma", clients="patient"), frame


def horseshoe(student: bool, clients: int = 12, rows: int = 40, columns: int = 8) -> Any:
    """Return slopes with a horseshoe, Gaussian rows, and a shift of each client."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * rows, columns))
    shift = np.repeat(0.5 * rng.standard_normal(clients), rows)
    y = x[:, :2] @ [1.0, -0.6] + shift + rng.standard_normal(len(x))

    def model(batch: ClientBatch) -> None:
        tau = pyro.sample("tau", dist.HalfCauchy(0.1))[..., None]
        own = pyro.sample("own", dist.HalfCauchy(torch.ones(columns)).to_event(1))
        slope = pyro.sample("slope", dist.Normal(0.0, tau * own).to_event(1))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        spread, noise = (pyro.sample(n, dist.HalfNormal(1.0)) for n in ("spread", "noise"))
        with batch.clients():
            own_prior = dist.StudentT(4.0, mu, spread) if student else dist.Normal(mu, spread)
            own_shift = pyro.sample("shift", own_prior)
            with batch.data():
                loc = own_shift + (batch.x * slope[..., None, :]).sum(-1)
                pyro.sample("y", dist.Normal(loc, noise), obs=batch.y)

    return model, of_rows(named(clients), rows, x=x, y=y)


def nations(count: int = 20, rows: int = 15) -> tuple[Any, pd.DataFrame]:
    """Return rows of nations in a ring whose field is all that differs: `car()` alone."""
    rng = np.random.default_rng(0)
    names = [f"n{i:02d}" for i in range(count)]
    ring = np.roll(np.eye(count), 1, 1)
    near = pd.DataFrame(ring + ring.T, index=names, columns=names)
    precision = np.diag(near.sum(1)) - 0.9 * near.to_numpy()
    field = np.linalg.cholesky(np.linalg.inv(precision)) @ rng.standard_normal(count)
    nation, x = np.repeat(np.arange(count), rows), rng.standard_normal(count * rows)
    y = 1.0 + 0.5 * x + field[nation] + rng.standard_normal(len(x))
    frame = pd.DataFrame({"y": y, "x": x, "nation": np.array(names)[nation]})
    text = "y ~ x + car(near, gr=nation)"
    return hierfl.formula(text, clients="nation", data2={"near": near}), frame


TEXTBOOK: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{f.__name__: f for f in (lsat, equiv, bones, trolley, oxford, seeds)},
    **{"baseball": baseball, "guimmun": immunized, "gp_80": curves},
    "car_alone": nations,
    "horseshoe": partial(horseshoe, False),
    "horseshoe_t": partial(horseshoe, True),
}
