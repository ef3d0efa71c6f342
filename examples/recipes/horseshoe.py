"""A regularized horseshoe: which of 27 columns matter to heart disease (Piironen and Vehtari 2017)?

Usage: `python examples/recipes/horseshoe.py [--smoke]`. The data ship with hierfl (UCI heart
disease).
"""

from __future__ import annotations

import sys

import pyro
import pyro.distributions as dist
import torch

import hierfl

EXPECTED, COLUMNS, PATIENTS = 5, 27, 920
TAU = EXPECTED / (COLUMNS - EXPECTED) * 2.0 / PATIENTS**0.5  # 2: the sd of a logit's pseudo-noise


def model(batch: hierfl.ClientBatch) -> None:
    """Logistic regression; slope_j ~ Normal(0, tau l_j), l_j^2 = c^2 own_j^2 / (c^2 + tau^2 own_j^2).

    Large slopes are held by a slab, a Student t of 4 degrees of freedom and scale 2: c^2 ~
    InverseGamma(2, 8).
    """
    tau = pyro.sample("tau", dist.HalfCauchy(TAU))[..., None]
    own = pyro.sample("own", dist.HalfCauchy(torch.ones(COLUMNS)).to_event(1))
    c2 = pyro.sample("c2", dist.InverseGamma(2.0, 8.0))[..., None]
    softened = own * (c2 / (c2 + tau**2 * own**2)).sqrt()
    slope = pyro.sample("slope", dist.Normal(0.0, tau * softened).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(mu, spread))  # of the hospital
        with batch.data():
            logits = shift + (batch.x * slope).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def data() -> hierfl.ClientData:
    """Return 920 patients of 4 hospitals."""
    return hierfl.datasets.heart_disease()


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print the columns with the largest slopes, and how many are left aside."""
    patients = data()
    fit = hierfl.fit(model, patients, rounds=rounds, seed=0)
    slope = fit.posterior(draws=draws, seed=0).posterior["slope"]
    low, middle, high = slope.quantile([0.05, 0.5, 0.95], ("chain", "draw")).values
    names = patients.features["x"]
    for j in abs(middle).argsort()[::-1][:8]:
        print(f"{names[j]:20s} {middle[j]:5.2f} (90% interval {low[j]:.2f} to {high[j]:.2f})")
    print(f"{int((abs(middle) < 0.1).sum())} of {COLUMNS} slopes have a median within 0.1 of 0")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
