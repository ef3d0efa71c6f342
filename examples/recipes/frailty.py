"""Survival with frailty: advanced lung cancer, right-censored, at 18 institutions (Loprinzi 1994).

Usage: `python examples/recipes/frailty.py [--smoke]`. Reads `lung.csv` in the folder that
HIERFL_DATA names; without it, patients are simulated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist

import hierfl

COLUMNS = ["age", "sex", "ecog"]


def model(batch: hierfl.ClientBatch) -> None:
    """Weibull proportional hazards in years, h(t) = shape t^(shape - 1) exp(eta), eta with a frailty by institution."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    log_hazard_ratio = pyro.sample(
        "log_hazard_ratio", dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    )
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with batch.clients():
        frailty = pyro.sample("frailty", dist.Normal(0.0, tau))  # log of the hazard's multiplier
        with batch.data():
            eta = intercept + frailty + (batch.x * log_hazard_ratio).sum(-1)
            log_hazard = eta + shape.log() + (shape - 1.0) * batch.log_years
            cumulative = (eta + shape * batch.log_years).exp()
            # a death adds the log hazard; everybody adds the log probability of having lived so long
            pyro.factor("survival", batch.died * log_hazard - cumulative)


def data() -> hierfl.ClientData:
    """Return 226 patients of 18 institutions, or as many simulated ones."""
    file = Path(os.environ.get("HIERFL_DATA", "")) / "lung.csv"
    frame = patients(file) if file.is_file() else simulated()
    return hierfl.ClientData.from_frame(
        frame, "institution", x=COLUMNS, died="died", log_years="log_years"
    )


def patients(file: Path) -> pd.DataFrame:
    """Return the patients whose institution and ECOG score are known."""
    lung = pd.read_csv(file).dropna(subset=["inst", "ph.ecog"])
    return pd.DataFrame(
        {
            "institution": "institution " + lung["inst"].astype(int).astype(str),
            "age": (lung["age"] - 60.0) / 10.0,
            "sex": (lung["sex"] == 2).astype(float),  # 1 = woman
            "ecog": lung["ph.ecog"],  # 0 (fully active) to 4 (bedbound)
            "died": lung["status"].astype(float),
            "log_years": np.log(lung["time"] / 365.25),
        }
    )


def simulated() -> pd.DataFrame:
    """Return 226 patients whose hazard ratios are 1.1, 0.6 and 1.6; the study ends after 2 years."""
    rng = np.random.default_rng(0)
    at = np.sort(rng.integers(18, size=226))
    age, sex, ecog = rng.normal(size=226), rng.integers(2, size=226), rng.integers(3, size=226)
    eta = 0.1 * age + np.log(0.6) * sex + np.log(1.6) * ecog + 0.3 * rng.normal(size=18)[at]
    years = (rng.exponential(size=226) / np.exp(eta)) ** (1.0 / 1.3)
    return pd.DataFrame(
        {
            "institution": [f"simulated {k + 1}" for k in at],
            "age": age,
            "sex": sex.astype(float),
            "ecog": ecog.astype(float),
            "died": (years < 2.0).astype(float),
            "log_years": np.log(np.minimum(years, 2.0)),
        }
    )


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print hazard ratios, and how far institutions are apart."""
    clients = data()
    print(f"{clients.num_rows} patients of {clients.names[0]}, ..., {clients.names[-1]}")
    fit = hierfl.fit(model, clients, rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    ratios = np.exp(drawn["log_hazard_ratio"])
    spread = np.exp(2 * 1.2816 * drawn["tau"])  # of the 90th to the 10th percentile of institutions
    columns = zip(["10 years of age", "a woman", "a point of ECOG"], range(3), strict=True)
    shown = {words: ratios[..., j] for words, j in columns} | {"between institutions": spread}
    for words, values in shown.items():
        low, middle, high = values.quantile([0.05, 0.5, 0.95]).values
        print(f"hazard ratio, {words}: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
