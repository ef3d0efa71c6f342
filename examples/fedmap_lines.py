"""FedMAP's toy problem: a prior learned from five clients on parallel lines, three of them with 1 to 3 rows.

Usage: `python examples/fedmap_lines.py [--smoke]`.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import nn

import hierfl
from hierfl.models.map_priors import LearnedVariance

ROWS = (60, 1, 2, 3, 50)


def clients(seed: int = 0) -> hierfl.ClientData:
    """Draw rows of five lines with slope -1 and intercepts 0, 4, 8, 12 and 16."""
    g = torch.Generator().manual_seed(seed)
    rows = {}
    for k, n in enumerate(ROWS):
        x = k + torch.randn(n, generator=g)
        rows[f"client {k + 1}"] = {
            "x": x[:, None],
            "y": -x + 4.0 * k + math.sqrt(0.8) * torch.randn(n, generator=g),
        }
    return hierfl.ClientData.from_clients(rows)


def main(rounds: int = 30) -> None:
    """Learn the prior's mean and precision of slope and intercept, and print every client's line."""
    torch.set_default_dtype(torch.float64)
    prior = LearnedVariance()
    # The negative log density is (y - f)^2 plus a constant: the paper's loss.
    squared = hierfl.models.likelihood.normal(math.sqrt(0.5))
    model = hierfl.models.map_network(nn.Linear(1, 1), prior=prior, likelihood=squared)
    methods = {
        "10 gradient steps": hierfl.methods.fedmap(model, newton_steps=1, server="gradient"),
        "exact": hierfl.methods.fedmap(model, newton_steps=1, server=prior.best),
    }
    for name, method in methods.items():
        fit = hierfl.fit(method, clients(), rounds=rounds if name == "exact" else 10)
        gamma, lines = fit.message["gamma"], fit.draws(1).own
        print(
            f"\n{name}: the prior's mean has slope {float(gamma['theta.weight']):.2f} "
            f"and intercept {float(gamma['theta.bias']):.2f},"
        )
        precision = [
            float(prior.alpha(gamma[f"s.{part}"]).squeeze()) for part in ("weight", "bias")
        ]
        print(f"with precision {precision[0]:.3f} and {precision[1]:.4f}")
        for k, n in enumerate(ROWS):
            print(
                f"  client {k + 1}, {n:2d} rows: {float(lines['w.weight'][0, k]):5.2f} x + "
                f"{float(lines['w.bias'][0, k]):5.2f}"
            )


if __name__ == "__main__":
    main(rounds=3 if "--smoke" in sys.argv else 30)
