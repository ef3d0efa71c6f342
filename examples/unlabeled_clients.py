"""FedVI personalizes clients without labels, by their inputs alone.

Each client's rows come from one of two groups. In one group the label increases with a feature, in
the other it decreases. Another feature is shifted slightly, in a direction that depends on the
group. A single row hardly reveals the group, but the rows of a client together do.

Usage: `python examples/unlabeled_clients.py [--smoke]`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hierfl
from hierfl.optimizers import SGD


def clients(names: range, seed: int) -> hierfl.ClientData:
    """Draw rows with y = 1 where the first feature is large, or in the other group where it is small."""
    g = torch.Generator().manual_seed(seed)
    drawn = {}
    for k in names:
        sign = 1.0 if k % 2 else -1.0
        x = torch.randn(60, 4, generator=g) + torch.tensor([0.0, 0.0, 0.5 * sign, 0.0])
        drawn[f"client {k}"] = {
            "x": x,
            "y": (sign * x[:, 0] + 0.3 * torch.randn(60, generator=g) > 0.0).long(),
        }
    return hierfl.ClientData.from_clients(drawn)


def main(rounds: int = 160) -> None:
    """Train on 30 clients; then personalize 10 new ones by half of their inputs and score the other half."""
    torch.manual_seed(0)
    train, new = clients(range(30), seed=1), clients(range(30, 40), seed=2)
    support, scored = new.split(0.5, seed=0)
    embedding = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    heads = hierfl.models.PersonalHeads(embedding, outputs=2, features=32, local_features=12)
    one_for_all = hierfl.models.network(nn.Sequential(embedding, nn.Linear(32, 2)))
    methods = {
        "FedAvg": hierfl.methods.fedavg(one_for_all, optimizer=SGD(0.3), steps=5, batch_size=None),
        "FedVI": hierfl.methods.fedvi(
            heads, optimizer=SGD(0.3), server_optimizer=SGD(1.0, momentum=0.9), hidden=32
        ),
    }
    for name, method in methods.items():
        fit = hierfl.fit(method, train, rounds=rounds)
        prediction = fit.personalize(support.without("y")).predict(scored.without("y"), draws=20)
        right = (prediction.mean.argmax(-1) == scored.fields["y"]).double().mean()
        print(f"{name}, new clients without labels: accuracy {100 * float(right):.0f}%")


if __name__ == "__main__":
    main(rounds=3 if "--smoke" in sys.argv else 160)
