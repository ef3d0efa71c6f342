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

import hierfl
from benchmarks.zoo.reading import data_of, program_of
from hierfl import ClientData

ZOO = (
    *("lsat", "equiv", "bones", "oxford", "seeds", "baseball"),
    *("slopes", "slopes_t", "hidden_units", "lynx"),
)
THRESHOLDS = (-1.9, -1.2, -0.7, 0.2, 0.9, 1.8)  # of trolley's seven answers


def of_zoo(name: str) -> tuple[Any, ClientData]:
    """Return a program of the zoo."""
    program = program_of(name)
    return program.model, data_of(program)


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
    **{name: partial(of_zoo, name) for name in ZOO},
    **{"trolley": trolley, "guimmun": immunized, "gp_80": curves},
    "car_alone": nations,
}
