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
import torch
import xarray as xr

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """Fall of blood pressure in mm Hg. Each clinic is of one of two kinds, whose label is summed out.

    A discrete site for the label would be refused. Given the label, patients are independent about
    the clinic's mean; all of them together are one event, so that they share the label.
    """
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
        means = torch.stack([none + about, none + gain + about], -1)[..., None]  # (C, 1, 2, 1)
        rows = dist.Normal(means, sigma[..., None, None]).mask(
            batch.packed(batch.mask())[..., None, :]
        )
        kind = torch.stack([1.0 - share, share], -1).expand(*about.shape, 2)
        mixture = dist.MixtureSameFamily(dist.Categorical(probs=kind), rows.to_event(1))
        pyro.sample("y", mixture, obs=batch.packed(batch.y))


def data() -> hierfl.ClientData:
    """Return 30 clinics of 15 to 40 patients; the drug works at clinics 13 to 30, where it takes 6 mm Hg off."""
    rng = np.random.default_rng(0)
    rows = []
    for k in range(30):
        mean = (6.0 if k >= 12 else 0.0) + rng.normal()
        fall = rng.normal(mean, 8.0, rng.integers(15, 41))
        rows.append(pd.DataFrame({"clinic": f"clinic {k + 1}", "y": fall}))
    return hierfl.ClientData.from_frame(pd.concat(rows), "clinic", y="y")


def works_at(drawn: xr.Dataset, clinics: hierfl.ClientData) -> xr.DataArray:
    """Return the probability that the drug works at each clinic: Bayes' rule at each draw, then the mean."""
    rows = clinics.fields["y"].split(clinics.counts.tolist())
    total = xr.DataArray([float(y.sum()) for y in rows], {"client": list(clinics.names)})
    count = xr.DataArray(clinics.counts.numpy(), {"client": list(clinics.names)})
    lower = drawn["none"] + drawn["about"]
    halfway = total - count * (lower + drawn["gain"] / 2.0)
    ratio = np.exp(drawn["gain"] * halfway / drawn["sigma"] ** 2)
    odds = ratio * drawn["share"] / (1.0 - drawn["share"])
    return (odds / (1.0 + odds)).mean(("chain", "draw"))


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print the two kinds, and at which clinics the drug works how surely."""
    clinics = data()
    fit = hierfl.fit(model, clinics, rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    for site, words in (
        ("share", "share of clinics where it works"),
        ("gain", "what it adds there"),
    ):
        low, middle, high = drawn[site].quantile([0.05, 0.5, 0.95]).values
        print(f"{words}: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")
    works = works_at(drawn, clinics).to_series().sort_values()
    print("Probability that it works, the clinics between 20 and 80%:")
    print(works[(works > 0.2) & (works < 0.8)].round(2).to_string())


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
