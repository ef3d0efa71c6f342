"""Clients that join after training: how accurate are they after 0 to 200 steps on their own rows?

Usage: `python examples/new_clients.py [--smoke]`.

`hierfl compare examples/studies/fedabml-tables-1-2.toml --variant table-2-fashion` is the full
study, on Fashion-MNIST with 160 new clients and several seeds.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits

import hierfl
from hierfl import methods, models
from hierfl.optimizers import SGD, Adam


def digits() -> hierfl.ClientData:
    """Return scikit-learn's digits at 20 clients with two classes each; pixels are in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    ids = hierfl.partition.pathological(y, num_clients=20, classes_per_client=2, seed=0)
    return hierfl.partition.to_clients(ids, x=torch.tensor(x / 16.0, dtype=torch.float32), y=y)


def main(rounds: int = 12, adapted: tuple[int, ...] = (0, 1, 2, 5, 10)) -> None:
    """Train on six clients; the other fourteen start from the result and take rounds of steps of their own.

    In a round every method takes 20 local steps: FedAvg on 20 mini-batches, the others five on each
    of four.
    """
    train, test = digits().split(0.7, seed=0)
    ours, theirs = list(train.names[:6]), list(train.names[6:])
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    hierarchy = models.bayesian_network(net, prior_scale="learned", scale_start=0.05)
    compared = {
        "FedAvg": methods.fine_tuned(
            methods.fedavg(models.network(net), optimizer=SGD(0.05), steps=20, batch_size=20),
            optimizer=SGD(0.05),
            steps=20,
            unit="step",
        ),
        "pFedBayes": methods.pfedbayes(
            hierarchy,
            kl_weight=0.05,
            optimizer=Adam(0.01),
            global_optimizer=Adam(0.01),
            inner_steps=5,
            steps=4,
            batch_size=20,
        ),
        "FedABML": methods.fedabml(
            hierarchy,
            kl_weight=0.01,
            optimizer=SGD(0.05),
            inner_steps=5,
            draws=1,
            steps=4,
            unit="step",
            batch_size=20,
        ),
    }
    print(f"{'steps':10s} {'  '.join(f'{20 * e:5d}' for e in adapted)}")
    for name, method in compared.items():
        fit = hierfl.fit(method, train.select(ours), rounds=rounds, cohort=3, seed=0)
        scores = []
        for e in adapted:
            new = fit.personalize(train.select(theirs), rounds=e)
            scores.append(
                100.0 * new.predict(test.select(theirs), draws=20).scores().accuracy.mean()
            )
        print(
            f"{name:10s} {'  '.join(f'{s:5.1f}' for s in scores)}   accuracy in %, mean over "
            f"{len(theirs)} new clients"
        )


if __name__ == "__main__":
    main(rounds=2, adapted=(0, 1)) if "--smoke" in sys.argv else main()
