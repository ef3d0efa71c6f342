"""Problems whose cost is at issue: many rows, clients of very different sizes, weak clients.

Each is a function of no arguments that returns a program or formula and its rows; add one to `HARD`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import hierfl
from benchmarks.textbook_problems import TEXTBOOK

SLOPES = (0.5, -0.3, 0.2, 0.0, 0.1, -0.4)


class Hard(NamedTuple):
    """A problem, and the CPU seconds asked of its fit, its `summary()` and `posterior(1000)`.

    Where no seconds are asked of a fit, NUTS is run after it, and may not be faster.
    """

    problem: Callable[[], tuple[Any, Any]]
    fit: float | None = None
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


def eyes(family: str, people: int) -> tuple[Any, pd.DataFrame]:
    """Return a frailty of each person with two eyes: `survival::diabetic`."""
    frame = pd.read_csv(Path(os.environ["HIERFL_DATA"]) / "diabetic.csv")
    frame = frame.assign(time=frame.time / 12.0 + 0.01, id="i" + frame.id.astype(str))
    frame = frame[frame.id.isin(sorted(frame.id.unique())[:people])]
    text = "time | event(status) ~ trt * laser + (1 | id)"
    return hierfl.formula(text, family, clients="id"), frame


def litters() -> tuple[Any, pd.DataFrame]:
    """Return a Weibull frailty of each litter of three: `survival::rats`, females."""
    frame = pd.read_csv(Path(os.environ["HIERFL_DATA"]) / "rats_litters.csv").query("sex == 'f'")
    text = "time | event(status) ~ rx + (1 | litter)"
    return hierfl.formula(text, "weibull", clients="litter"), frame.assign(time=frame.time / 100.0)


def classes() -> tuple[Any, pd.DataFrame]:
    """Return a regression with a noise scale of each of 133 classes: `MASS::nlschools`."""
    frame = pd.read_csv(Path(os.environ["HIERFL_DATA"]) / "nlschools.csv")
    frame = frame.rename(columns={"class": "cls"})
    texts = ["lang ~ IQ + (1 | cls)", "sigma ~ IQ + (1 | cls)"]
    return hierfl.formula(texts, clients="cls"), frame


HARD = {
    "logistic_200k": Hard(partial(hospitals, "bernoulli", 200_000), 8.0),
    "poisson_200k": Hard(partial(hospitals, "poisson", 200_000), 8.0),
    "gaussian_200k": Hard(partial(hospitals, "gaussian", 200_000), 6.0),
    "logistic_1m": Hard(partial(hospitals, "bernoulli", 1_000_000), 30.0),
    "one_large": Hard(partial(sizes, 3_000, 3, 60), 3.0),
    "weibull_pairs": Hard(partial(eyes, "weibull", 197)),
    "lognormal_pairs": Hard(partial(eyes, "lognormal", 197)),
    "rats": Hard(litters),
    "nlschools_sigma": Hard(classes),
    **{name: Hard(problem) for name, problem in TEXTBOOK.items()},
}
