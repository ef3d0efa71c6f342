"""The parts of pFedBreD one by one: how a client's prior mean is moved by a gradient, by memory, or by both.

Usage: `python examples/prior_ablation.py [--smoke]`.

"none" leaves the prior mean at the client's copy of the global model. `hierfl compare
examples/studies/prior-strategies.toml` is the full study: PRIOR's Table 2 on MNIST and
Fashion-MNIST.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import hierfl
from hierfl import methods, models


def digits() -> hierfl.ClientData:
    """Return scikit-learn's digits at 20 clients with two classes each; pixels are in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    ids = hierfl.partition.pathological(y, num_clients=20, classes_per_client=2, seed=0)
    return hierfl.partition.to_clients(ids, x=torch.tensor(x / 16.0, dtype=torch.float32), y=y)


def main(rounds: int = 10) -> None:
    """Print the accuracy of the clients' own models, by strategy.

    As in Algorithm 1, all clients train in every round and a fifth of them are averaged.
    """
    train, test = digits().split(0.7, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.1), nn.Linear(32, 10))
    model = models.bayesian_network(net, prior_scale=1.0)
    kinds: dict[str, hierfl.Method] = {}
    for name in ("none", "lg", "meg", "mh", "mh24", "mh-code"):
        method = methods.pfedbred(model, name, prox=15.0, steps=10)  # type: ignore[arg-type]
        kinds[name] = methods.averaging_some(method, share=0.2)
    kinds["mh + FT"] = methods.fine_tuned(
        kinds["mh"], steps=1, unit="step", when="every round", mirror=True
    )
    kinds["mh + AM"] = methods.over_relaxed(kinds["mh"], beta=2.0)
    for name, method in kinds.items():
        scores = hierfl.fit(method, train, rounds=rounds, seed=0).predict(test, draws=1).scores()
        print(
            f"{name:8s} accuracy {100.0 * scores.accuracy.mean():5.1f} %, log score "
            f"{scores.log_score.mean():.3f}"
        )


if __name__ == "__main__":
    main(rounds=2 if "--smoke" in sys.argv else 10)
