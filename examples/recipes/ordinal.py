"""Ordinal labels with a shift of each client: how narrow are the arteries of patients of four hospitals, 0 to 4?

Usage: `python examples/recipes/ordinal.py [--smoke]`. The data ship with hierfl (UCI heart disease,
Detrano et al. 1989).
"""

from __future__ import annotations

import sys
from importlib import resources

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import hierfl

COLUMNS = ["age", "sex", "thalach", "oldpeak", "exang"]


def model(batch: hierfl.ClientBatch) -> None:
    """Cumulative logit, P(grade <= j) = logistic(cut_j - eta): common slopes, and a shift for each hospital."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
    first = pyro.sample("first", dist.Normal(0.0, 2.0))
    steps = pyro.sample("steps", dist.Gamma(2.0, 2.0).expand([3]).to_event(1))  # between cuts
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    cuts = first[..., None] + torch.cat([torch.zeros_like(steps[..., :1]), steps.cumsum(-1)], -1)
    with batch.clients():
        shift = pyro.sample("shift", dist.Normal(0.0, tau))
        with batch.data():
            eta = shift + (batch.x * slope).sum(-1)
            pyro.sample("grade", dist.Categorical(probs=grades(eta, cuts)), obs=batch.grade)


def grades(eta: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of grades 0 to 4.

    `dist.OrderedLogistic` is the same, but writes in place, so that hierfl must run clients one at
    a time.
    """
    up_to = (cuts - eta[..., None]).sigmoid()
    below = torch.cat([torch.zeros_like(up_to[..., :1]), up_to], -1)
    return torch.cat([up_to, torch.ones_like(up_to[..., :1])], -1) - below


def data() -> hierfl.ClientData:
    """Return 920 patients with `grade`, the source's `num`: 0 (no narrowing) to 4."""
    patients = hierfl.datasets.heart_disease()
    chosen = [patients.features["x"].index(name) for name in COLUMNS]
    with resources.files(hierfl.datasets).joinpath("shipped/heart_disease.npz").open("rb") as file:
        source = np.load(file)
        return hierfl.ClientData.from_arrays(
            source["client_id"],
            names=patients.names,
            features={"x": COLUMNS},
            x=patients.fields["x"][:, chosen],
            grade=source["num"].astype(np.int64),
        )


def main(rounds: int | None = None, draws: int = 2000) -> None:
    """Print odds ratios of a higher grade, by feature and by hospital."""
    hospitals = data()
    fit = hierfl.fit(model, hospitals, rounds=rounds, seed=0)
    drawn = fit.posterior(draws=draws, seed=0).posterior
    print("Odds ratio of a higher grade (90% interval)")
    ratios = {name: np.exp(drawn["slope"][..., j]) for j, name in enumerate(COLUMNS)}
    ratios |= {name: np.exp(drawn["shift"].sel(client=name)) for name in hospitals.names}
    for name, values in ratios.items():
        low, middle, high = values.quantile([0.05, 0.5, 0.95]).values
        print(f"{name:12s} {middle:5.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(rounds=1, draws=100) if "--smoke" in sys.argv else main()
