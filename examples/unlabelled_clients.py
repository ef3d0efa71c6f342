"""FedVI: clients whose labels nobody has are personalised by their inputs alone.

Each client's rows come from one of two groups: in one the label goes with a feature, in the other against it, and which of them it
is shows a little in where another feature lies. A row hardly tells; the rows of a client together do.

python examples/unlabelled_clients.py [--smoke]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hierfl
from hierfl.optimisers import SGD


def clients(names: range, seed: int) -> hierfl.ClientData:
    """Rows (x, y), y = 1 where the first feature is large, or in the other group where it is small."""
    g = torch.Generator().manual_seed(seed)
    parts = {}
    for k in names:
        sign = 1.0 if k % 2 else -1.0
        x = torch.randn(60, 4, generator=g) + torch.tensor([0.0, 0.0, 0.5 * sign, 0.0])
        parts[f"client {k}"] = {
            "x": x,
            "y": (sign * x[:, 0] + 0.3 * torch.randn(60, generator=g) > 0.0).long(),
        }
    return hierfl.ClientData.from_clients(parts)


def main(rounds: int = 160) -> None:
    """Train on thirty clients; then ten new ones hand over inputs, no label."""
    torch.manual_seed(0)
    train, new = clients(range(30), seed=1), clients(range(30, 40), seed=2)
    support, asked = new.split(0.5, seed=0)
    embedding = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    heads = hierfl.models.PersonalHeads(embedding, outputs=2, features=32, local_features=12)
    one_for_all = hierfl.models.network(nn.Sequential(embedding, nn.Linear(32, 2)))
    methods = {
        "FedAvg": hierfl.methods.fedavg(one_for_all, optimiser=SGD(0.3), steps=5, batch_size=None),
        "FedVI": hierfl.methods.fedvi(
            heads, optimiser=SGD(0.3), server_optimiser=SGD(1.0, momentum=0.9), hidden=32
        ),
    }
    for name, method in methods.items():
        fit = hierfl.fit(method, train, rounds=rounds)
        found = fit.personalise(support.without("y")).predict(asked.without("y"), draws=20)
        right = (found.mean.argmax(-1) == asked.fields["y"]).double().mean()
        print(f"{name}, new clients without labels: {100 * float(right):.0f} % right")
    print(f"What a PAC-Bayes bound of FedVI is made of: {hierfl.pac_bayes(fit)}")


if __name__ == "__main__":
    main(rounds=3 if "--smoke" in sys.argv else 160)
