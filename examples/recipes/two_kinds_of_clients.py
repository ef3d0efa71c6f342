"""A mixture of two kinds of clients: at which of 30 clinics does a new drug work, and at which does it not?

Usage: `python examples/recipes/two_kinds_of_clients.py [--smoke]`. The clinics are simulated: 12 of
them store the drug too warm.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """Fall of blood pressure in mm Hg. Each clinic is of one of two kinds, a label that is summed out."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))  # of clinics where the drug works
    none = pyro.sample("none", dist.Normal(0.0, 3.0))  # mean fall where it does not
    gain = pyro.sample(
        "gain", dist.LogNormal(2.0, 0.5)
    )  # added where it works; > 0 says which is which
    sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
    with batch.clients():
        about = pyro.sample(
            "about", dist.Normal(0.0, 1.0)
        )  # of the clinic, about the mean of its kind
        works = pyro.sample("works", dist.Bernoulli(share))
        with batch.data():
            pyro.sample("y", dist.Normal(none + gain * works + about, sigma), obs=batch.y)


def data() -> hierfl.ClientData:
    """Return 30 clinics of 15 to 40 patients; the drug works at clinics 13 to 30, where it takes 6 mm Hg off."""
    rng = np.random.default_rng(0)
    rows = []
    for k in range(30):
        mean = (6.0 if k >= 12 else 0.0) + rng.normal()
        fall = rng.normal(mean, 8.0, rng.integers(15, 41))
        rows.append(pd.DataFrame({"clinic": f"clinic {k + 1}", "y": fall}))
    return hierfl.ClientData.from_frame(pd.concat(rows), "clinic", y="y")


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print the two kinds, and at which clinics the drug works how surely."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    for site, words in (
        ("share", "share of clinics where it works"),
        ("gain", "what it adds there"),
    ):
        low, middle, high = drawn[site].quantile([0.05, 0.5, 0.95]).values
        print(f"{words}: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")
    labels = fit.infer_discrete(draws=draws, seed=0).frame
    works = labels.set_index("client")[1].sort_values()
    print("Probability that it works, the clinics between 20 and 80%:")
    print(works[(works > 0.2) & (works < 0.8)].round(2).to_string())


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
