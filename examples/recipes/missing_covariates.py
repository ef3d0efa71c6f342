"""Missing covariates: does appetite go with performance in lung cancer, where the calories of 47 patients are missing?

Usage: `python examples/recipes/missing_covariates.py [--smoke]`. Reads `lung.csv` in the folder
that HIERFL_DATA names (Loprinzi 1994); without it, patients are simulated. Two programs of one
posterior: `imputed` samples the missing values, `model` integrates them out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import hierfl

MOST = 6  # missing values of a client, at most: the size of `missing`; `data` checks it


def priors() -> tuple[Tensor, ...]:
    """Sample what both programs share: of the regression (level, slope, tau, sigma), and of calories (m, s)."""
    return (
        pyro.sample("mu", dist.Normal(0.0, 1.0)),
        pyro.sample("slope", dist.Normal(0.0, 1.0)),
        pyro.sample("tau", dist.HalfNormal(0.5)),
        pyro.sample("sigma", dist.HalfNormal(2.0)),
        pyro.sample("m", dist.Normal(0.0, 1.0)),
        pyro.sample("s", dist.HalfNormal(2.0)),
    )


def model(batch: hierfl.ClientBatch) -> None:
    """Marginalized: with x missing, y ~ Normal(level + slope m, sqrt(sigma^2 + slope^2 s^2))."""
    mu, slope, tau, sigma, m, s = priors()
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("x", dist.Normal(m, s).mask(batch.known > 0), obs=batch.x)
            mean = level + slope * torch.where(batch.known > 0, batch.x, m)
            spread = (sigma**2 + slope**2 * s**2 * (1.0 - batch.known)).sqrt()
            pyro.sample("y", dist.Normal(mean, spread), obs=batch.y)


def imputed(batch: hierfl.ClientBatch) -> None:
    """Imputed: the missing values of a client are one local site of fixed size, and `slot` says whose is which.

    A client with fewer than MOST missing values draws the others from their prior; they touch
    nothing else.
    """
    mu, slope, tau, sigma, m, s = priors()
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        spread = s[..., None].expand(*s.shape, MOST)
        missing = pyro.sample("missing", dist.Normal(m[..., None], spread).to_event(1))
        with batch.data():
            pyro.sample("x", dist.Normal(m, s).mask(batch.known > 0), obs=batch.x)
            x = torch.where(batch.known > 0, batch.x, (batch.slot * missing).sum(-1))
            pyro.sample("y", dist.Normal(level + slope * x, sigma), obs=batch.y)


def data() -> hierfl.ClientData:
    """Return patients of 18 institutions: `x`, 0 where missing; `known`, 0/1; `slot`, one-hot; `y`."""
    file = Path(os.environ.get("HIERFL_DATA", "")) / "lung.csv"
    frame = patients(file) if file.is_file() else simulated()
    gone = frame["x"].isna()
    slot = gone.groupby(frame["institution"]).cumsum().where(gone, 0)
    frame = frame.assign(x=frame["x"].fillna(0.0), known=1.0 - gone)
    one_hot = {f"slot {j}": (slot == j).astype(float) for j in range(1, MOST + 1)}
    assert slot.max() <= MOST, f"a client has {slot.max()} missing values: MOST must be as many"
    return hierfl.ClientData.from_frame(
        frame.assign(**one_hot), "institution", x="x", known="known", slot=list(one_hot), y="y"
    )


def patients(file: Path) -> pd.DataFrame:
    """Return the patients with an institution and a score: calories at meals, and Karnofsky's score."""
    lung = pd.read_csv(file).dropna(subset=["inst", "ph.karno"])
    name = "institution " + lung["inst"].astype(int).astype(str)
    x, y = (lung["meal.cal"] - 900.0) / 400.0, (lung["ph.karno"] - 80.0) / 10.0
    return pd.DataFrame({"institution": name, "x": x, "y": y}).reset_index(drop=True)


def simulated() -> pd.DataFrame:
    """Return 12 patients of each of 18 institutions; one value in five is missing, at random."""
    rng = np.random.default_rng(0)
    at = np.repeat(np.arange(18), 12)
    x = rng.normal(size=216)
    y = 0.4 * rng.normal(size=18)[at] + 0.3 * x + rng.normal(size=216)
    x[np.arange(216) % 5 == 0] = np.nan
    return pd.DataFrame({"institution": [f"simulated {k + 1}" for k in at], "x": x, "y": y})


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print the slope by both programs, and by the complete rows alone."""
    clients = data()
    print(f"{clients.num_rows} patients, {clients.names[0]}, ..., {clients.names[-1]}")
    for words, program in (("marginalized", model), ("imputed", imputed)):
        fit = hierfl.fit(program, clients, rounds=rounds, seed=0)
        slope = fit.posterior(draws=draws, seed=0).posterior["slope"]
        low, middle, high = (10.0 * slope).quantile([0.05, 0.5, 0.95]).values
        print(f"{words}: {middle:.2f} points a 400 kcal (90% interval {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
