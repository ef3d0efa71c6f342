"""A Gaussian process a client: a laboratory marker of 12 patients, taken at times of their own.

Usage: `python examples/recipes/gaussian_process.py [--smoke]`. The patients are simulated.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import hierfl


def model(batch: hierfl.ClientBatch) -> None:
    """A patient's level, a smooth course about it (squared exponential, lengths in weeks), and noise."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.LogNormal(1.0, 0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        week = batch.packed(batch.week)  # (C, 1, B)
        distance = (week[..., :, None] - week[..., None, :]) / length[..., None, None]
        course = (amplitude**2)[..., None, None] * (-0.5 * distance**2).exp()
        noise = (sigma**2)[..., None, None] * torch.eye(batch.num_rows, dtype=week.dtype)
        marker = batch.joint_normal(level[..., None], course + noise)
        pyro.sample("marker", marker, obs=batch.packed(batch.marker))


def data() -> hierfl.ClientData:
    """Return 12 patients with 8 to 16 visits in 20 weeks: `week` and `marker`."""
    rng = np.random.default_rng(0)
    visits = []
    for k in range(12):
        week = np.sort(rng.uniform(0.0, 20.0, rng.integers(8, 17)))
        distance = (week[:, None] - week) / 3.0
        course = 0.8**2 * np.exp(-0.5 * distance**2) + 0.3**2 * np.eye(len(week))
        marker = rng.multivariate_normal(np.full(len(week), rng.normal(1.0, 0.5)), course)
        visits.append(pd.DataFrame({"patient": f"patient {k + 1}", "week": week, "marker": marker}))
    return hierfl.ClientData.from_frame(pd.concat(visits), "patient", week="week", marker="marker")


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print how far markers swing and how fast, beside the noise of a visit."""
    fit = hierfl.fit(model, data(), rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    words = {
        "tau": "sd of patients' levels",
        "amplitude": "sd of a patient's course about the level",
        "length": "weeks over which a course stays similar",
        "sigma": "sd of a visit's noise",
    }
    for site, meaning in words.items():
        low, middle, high = drawn[site].quantile([0.05, 0.5, 0.95]).values
        print(f"{meaning}: {middle:.2f} (90% interval {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
