"""Three levels: voters in states in regions, of the polls before the election of 1988 (Gelman and Hill 2007).

Usage: `python examples/recipes/three_levels.py [--smoke]`. Reads `election88.npz` in the folder
that HIERFL_DATA names; without it, voters are simulated. Regions stand above the clients: their
levels are global sites in a plate.
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

import hierfl

REGIONS = ["Northeast", "Midwest", "South", "West", "DC"]


def model(batch: hierfl.ClientBatch) -> None:
    """Logit of a vote for Bush: the state's level, which lies about its region's, and the voter's sex and race."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    sd_region = pyro.sample("sd_region", dist.HalfNormal(1.0))
    sd_state = pyro.sample("sd_state", dist.HalfNormal(1.0))
    spread = sd_region[..., None].expand(*sd_region.shape, 5)
    region = pyro.sample("region", dist.Normal(mu[..., None], spread).to_event(1))
    with batch.clients():
        state = pyro.sample("state", dist.Normal(region[..., batch.region], sd_state))
        with batch.data():
            logits = state + (batch.x * slope).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def data() -> hierfl.ClientData:
    """Return 11,566 voters of 49 states, or simulated ones: `x` (female, black), `y`; client field `region`."""
    if (Path(os.environ.get("HIERFL_DATA", "")) / "election88.npz").is_file():
        return hierfl.datasets.election88()
    rng = np.random.default_rng(0)
    state = np.repeat(np.arange(49), 40)
    region = np.minimum(state // 12, 4)
    level = (0.4 * rng.normal(size=5))[region] + (0.3 * rng.normal(size=49))[state]
    female, black = rng.integers(2, size=1960), (rng.random(1960) < 0.1).astype(int)
    ill = 1.0 / (1.0 + np.exp(-(level - 0.1 * female - 1.6 * black)))
    frame = pd.DataFrame(
        {
            "state": [f"simulated {k + 1}" for k in state],
            "female": female.astype(float),
            "black": black.astype(float),
            "region": region,
            "y": (rng.random(1960) < ill).astype(float),
        }
    )
    return hierfl.ClientData.from_frame(
        frame, "state", client_fields={"region": "region"}, x=["female", "black"], y="y"
    )


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print how votes vary between regions, between states, and where Bush is strongest."""
    voters = data()
    print(f"{voters.num_rows} voters of {voters.names[0]}, ..., {voters.names[-1]}")
    fit = hierfl.fit(model, voters, rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    shown = {"sd between regions": drawn["sd_region"], "sd between states": drawn["sd_state"]}
    shown |= {f"level of {name}": drawn["region"][..., j] for j, name in enumerate(REGIONS)}
    for words, values in shown.items():
        low, middle, high = values.quantile([0.05, 0.5, 0.95]).values
        print(f"{words}, logits: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")
    levels = drawn["state"].mean(("chain", "draw")).to_series().sort_values()
    print(f"strongest in {levels.index[-1]}, weakest in {levels.index[0]}")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
