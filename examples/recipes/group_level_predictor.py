"""A group-level predictor: does the uranium in a county's soil move its radon (Gelman and Hill 2007, chapter 12)?

Usage: `python examples/recipes/group_level_predictor.py [--smoke]`. The clients are the 85 counties
of Minnesota.
"""

from __future__ import annotations

import sys

import pyro
import pyro.distributions as dist

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """Regress log radon on the floor where it is measured; the county's level follows its log uranium."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    uranium = pyro.sample("uranium", dist.Normal(0.0, 2.0))
    ground_floor = pyro.sample("ground_floor", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu + uranium * batch.log_uranium, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(level + ground_floor * batch.floor, sigma), obs=batch.y)


def data() -> hierfl.ClientData:
    """Return 919 homes in 85 counties; they ship with hierfl."""
    return hierfl.datasets.radon()


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print what a doubling of uranium does, and what is left to counties once uranium is known."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    doubled = 100.0 * (2.0 ** drawn["uranium"] - 1.0)
    low, middle, high = doubled.quantile([0.05, 0.5, 0.95]).values
    print(f"Twice the uranium: {middle:.0f}% more radon (90% interval {low:.0f} to {high:.0f}%).")
    for site, words in (("tau", "between counties"), ("sigma", "between homes")):
        low, middle, high = drawn[site].quantile([0.05, 0.5, 0.95]).values
        print(f"Sd of log radon {words}: {middle:.2f} ({low:.2f} to {high:.2f}).")
    print(f"\n{fit.summary()}")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
