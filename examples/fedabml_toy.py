"""FedABML and FedAvg on two clients with few rows: distance of the global mean to least squares on all rows.

Usage: `python examples/fedabml_toy.py [--smoke]`.

`hierfl study toy-linear-regression` is the full study, with bands over seeds and figures.
"""

from __future__ import annotations

import sys

import torch

import hierfl
from hierfl import methods, models
from hierfl.optimisers import SGD


def two_clients() -> hierfl.ClientData:
    """Draw rows of y = x . (1, -1) + noise; x is wide in one direction, a different one for each client."""
    g = torch.Generator().manual_seed(0)
    parts = {}
    for name, rows, scales in (("a", 20, (3.0, 0.5)), ("b", 30, (0.5, 3.0))):
        x = torch.randn(rows, 2, generator=g) * torch.tensor(scales)
        parts[name] = {"x": x, "y": x @ torch.tensor([1.0, -1.0]) + torch.randn(rows, generator=g)}
    return hierfl.ClientData.from_clients(parts)


def main(rounds: int = 20) -> None:
    """Fit both methods with ten local steps a round, and print their distances to least squares."""
    data = two_clients()
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    noise = models.likelihood.normal(1.0)
    local = {"batch_size": None}
    fedavg = methods.fedavg(
        models.network(net, likelihood=noise), optimiser=SGD(0.05), steps=10, **local
    )
    hierarchy = models.bayesian_network(
        net, likelihood=noise, prior_scale="learned", scale_start=0.05
    )
    fedabml = methods.fedabml(
        hierarchy,
        lr=0.05,
        inner_steps=5,
        steps=2,
        unit="step",
        draws=50,
        **local,
    )
    target = torch.linalg.lstsq(data.fields["x"], data.fields["y"][:, None]).solution.flatten()
    for name, method in (("FedAvg", fedavg), ("FedABML", methods.by_rows(fedabml))):
        fit = hierfl.fit(method, data, rounds=rounds, seed=0)
        at = fit.message["theta.weight"].flatten()
        print(
            f"{name}: {at.numpy().round(3)}, {float((at - target).norm()):.4f} from least squares on all rows"
        )
    print(
        fit.personalise(data, rounds=1)
        .posterior(200)["posterior"]["w.weight"]
        .std(("chain", "draw"))
        .values.round(3)
    )


if __name__ == "__main__":
    main(rounds=3 if "--smoke" in sys.argv else 20)
