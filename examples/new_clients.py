"""Clients that join after training: how accurate are they after 0, 1, 2, 5 and 10 passes over their own rows?

Usage: `python examples/new_clients.py [--smoke]`.

`hierfl study new-clients` is the full study, on Fashion-MNIST with 160 new clients and several seeds.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits

import hierfl
from hierfl import methods, models
from hierfl.optimisers import SGD


def digits() -> hierfl.ClientData:
    """Return scikit-learn's digits at 20 clients with two classes each; pixels are in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    ids = hierfl.partition.pathological(y, num_clients=20, classes_per_client=2, seed=0)
    return hierfl.partition.to_clients(ids, x=torch.tensor(x / 16.0, dtype=torch.float32), y=y)


def main(rounds: int = 12, passes: tuple[int, ...] = (0, 1, 2, 5, 10)) -> None:
    """Train on six clients; the other fourteen start from the result and take passes over their own rows."""
    train, test = digits().split(0.7, seed=0)
    ours, theirs = list(train.names[:6]), list(train.names[6:])
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    hierarchy = models.bayesian_network(net, prior_scale="learned", scale_start=0.05)
    compared = {
        "FedAvg": methods.fine_tuned(
            methods.fedavg(
                models.network(net), optimiser=SGD(0.05), steps=2, unit="epoch", batch_size=20
            ),
            optimiser=SGD(0.05),
        ),
        "pFedBayes": methods.pfedbayes(
            hierarchy, zeta=0.05, lr=0.01, eta=0.01, steps=6, batch_size=20
        ),
        "FedABML": methods.fedabml(
            hierarchy, lam=0.01, lr=0.05, eta=0.5, inner_steps=3, draws=1, steps=2, batch_size=20
        ),
    }
    print(f"{'passes':10s} {'  '.join(f'{e:5d}' for e in passes)}")
    for name, method in compared.items():
        fit = hierfl.fit(method, train.select(ours), rounds=rounds, cohort=3, seed=0)
        scores = []
        for e in passes:
            new = fit.personalise(train.select(theirs), rounds=e)
            scores.append(
                100.0 * new.predict(test.select(theirs), draws=20).scores().accuracy.mean()
            )
        print(
            f"{name:10s} {'  '.join(f'{s:5.1f}' for s in scores)}   accuracy in %, mean over "
            f"{len(theirs)} new clients"
        )


if __name__ == "__main__":
    main(rounds=2, passes=(0, 1)) if "--smoke" in sys.argv else main()
