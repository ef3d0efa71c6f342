"""AR(1) a client: how long does a bad day last? Daily mood of 20 people, each with a level and an inertia of its own.

Usage: `python examples/recipes/autoregression.py [--smoke]`. The diaries are simulated.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """Mood tends to the person's level: mood[t] = level + inertia (mood[t - 1] - level) + noise.

    It is the likelihood given the first day, which a diary has as the first `before`.
    """
    mean_level = pyro.sample("mean_level", dist.Normal(5.0, 2.0))
    sd_level = pyro.sample("sd_level", dist.HalfNormal(2.0))
    mean_inertia = pyro.sample("mean_inertia", dist.Normal(0.0, 0.5))
    sd_inertia = pyro.sample("sd_inertia", dist.HalfNormal(0.3))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mean_level, sd_level))
        inertia = pyro.sample("inertia", dist.Normal(mean_inertia, sd_inertia))
        with batch.data():
            mean = level + inertia * (batch.before - level)
            pyro.sample("mood", dist.Normal(mean, sigma), obs=batch.mood)


def data() -> hierfl.ClientData:
    """Return diaries of 20 people, 30 to 50 days long: `mood`, and `before`, the mood of the day before."""
    rng = np.random.default_rng(0)
    diaries = []
    for k in range(20):
        level, inertia = rng.normal(5.5, 0.8), rng.normal(0.4, 0.15)
        mood = [level]
        for _ in range(rng.integers(30, 51)):
            mood.append(level + inertia * (mood[-1] - level) + rng.normal())
        diaries.append(
            pd.DataFrame({"person": f"person {k + 1}", "mood": mood[1:], "before": mood[:-1]})
        )
    return hierfl.ClientData.from_frame(pd.concat(diaries), "person", mood="mood", before="before")


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print inertia in the population, and the people with least and most of it."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    for site in ("mean_inertia", "sd_inertia"):
        low, middle, high = drawn[site].quantile([0.05, 0.5, 0.95]).values
        print(f"{site}: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")
    inertias = drawn["inertia"].mean(("chain", "draw")).to_series().sort_values()
    for name, inertia in inertias.iloc[[0, -1]].items():
        print(f"{name}: of a bad day {100 * inertia:.0f}% are left the next")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
