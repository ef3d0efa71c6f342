"""Ten clients see the same two classes through their own linear maps: individual models, FedAvg, and FedMAP.

Usage: `python examples/fedmap_synthetic.py [--smoke]`.

`hierfl compare examples/studies/fedmap-tables.toml` is the full study, with tuned step sizes and
more methods.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hierfl
from hierfl.comparisons.scores import balanced
from hierfl.models.learned_priors import Isotropic
from hierfl.optimizers import Adam
from hierfl.studies.synthetic_clients import synthetic_clients


def main(rounds: int = 20, rows: int = 2000) -> None:
    """Compare balanced accuracies under label skew: five clients have 85 % of their rows in one class."""
    train, test = synthetic_clients("label", seed=0, rows=rows)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
    )
    likelihood, adam = hierfl.models.likelihood.bernoulli(), Adam(1e-3)
    common = hierfl.models.network(net, likelihood=likelihood)
    # Clients differ most in the first layer, so its prior is the wider one.
    loose_then_tight = {"0.": Isotropic(120.0), "": Isotropic(5.0)}
    personal = hierfl.models.learned_prior_network(
        net, prior=loose_then_tight, likelihood=likelihood
    )
    methods = {
        "Individual": hierfl.methods.local_only(
            common, optimizer=adam, steps=5, unit="epoch", batch_size=64
        ),
        "FedAvg": hierfl.methods.fedavg(
            common, optimizer=adam, steps=5, unit="epoch", batch_size=64
        ),
        "FedMAP": hierfl.methods.fedmap(personal, optimizer=adam, steps=5, batch_size=64),
    }
    for name, method in methods.items():
        scores = 100.0 * balanced(hierfl.fit(method, train, rounds=rounds).predict(test))
        by_client = ", ".join(f"{score:.0f}" for score in scores)
        print(f"{name:10s} {scores.mean():5.1f} %   by client: {by_client}")


if __name__ == "__main__":
    main(rounds=2, rows=100) if "--smoke" in sys.argv else main()
