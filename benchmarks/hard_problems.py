"""Problems whose cost is at issue: many rows, clients of very different sizes, many clients.

Each is a function of no arguments that returns a program or formula and its rows; add one to `HARD`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import hierfl

SLOPES = (0.5, -0.3, 0.2, 0.0, 0.1, -0.4)


class Hard(NamedTuple):
    """A problem, and the CPU seconds asked of its fit, `summary()` and `posterior(1000)`."""

    problem: Callable[[], tuple[Any, Any]]
    fit: float
    summary: float = 2.0
    draws: float = 2.0


def hospitals(family: str, rows: int, clients: int = 20) -> tuple[Any, pd.DataFrame]:
    """Return a regression on six covariates with an intercept of each hospital, and simulated rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, len(SLOPES)))
    hospital = np.sort(rng.integers(clients, size=rows))
    eta = -1.0 + x @ SLOPES + 0.5 * rng.standard_normal(clients)[hospital]
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(len(SLOPES))])
    frame["y"], frame["hospital"] = _responses(family, eta, rng), hospital
    return _model(frame, family), frame


def sizes(large: int, small: int, number: int) -> tuple[Any, pd.DataFrame]:
    """Return a logistic regression of one client of many rows and a number of clients of few."""
    rng = np.random.default_rng(0)
    hospital = np.repeat(np.arange(number + 1), [large, *[small] * number])
    x = rng.standard_normal((len(hospital), len(SLOPES)))
    eta = -0.5 + x @ SLOPES + 0.5 * rng.standard_normal(number + 1)[hospital]
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(len(SLOPES))])
    frame["y"], frame["hospital"] = _responses("bernoulli", eta, rng), hospital
    return _model(frame, "bernoulli"), frame


def _model(frame: pd.DataFrame, family: str) -> Any:
    names = " + ".join(name for name in frame if str(name).startswith("x"))
    return hierfl.formula(f"y ~ {names} + (1 | hospital)", clients="hospital", family=family)


def _responses(family: str, eta: Any, rng: np.random.Generator) -> Any:
    if family == "gaussian":
        return eta + rng.standard_normal(len(eta))
    if family == "poisson":
        return rng.poisson(np.exp(0.5 * eta)).astype(float)
    return (rng.random(len(eta)) < 1.0 / (1.0 + np.exp(-eta))).astype(float)


HARD = {
    "logistic_200k": Hard(partial(hospitals, "bernoulli", 200_000), 8.0),
    "poisson_200k": Hard(partial(hospitals, "poisson", 200_000), 8.0),
    "gaussian_200k": Hard(partial(hospitals, "gaussian", 200_000), 6.0),
    "logistic_1m": Hard(partial(hospitals, "bernoulli", 1_000_000), 30.0),
    "one_large": Hard(partial(sizes, 3_000, 3, 60), 3.0),
}
