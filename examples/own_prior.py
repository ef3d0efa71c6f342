"""A prior of your own for pFedBreD, defined by a convex function.

Its penalty grows like |x| log |x| far out and like x^2 near 0.

Usage: `python examples/own_prior.py [--smoke]`.
"""

from __future__ import annotations

import sys

import torch

import hierfl
from hierfl.methods import pfedbred
from hierfl.models import bregman, bregman_network, likelihood
from hierfl.optimizers import SGD


def main(rounds: int = 30) -> None:
    """Fit four hospitals under four priors, each defined by its log-normalizer g.

    The last prior is our own: g = cosh, with its gradient, the inverse of the gradient, and the
    convex conjugate.
    """
    train, test = hierfl.datasets.heart_disease().split(0.7, seed=0)
    priors = {
        "Gaussian": bregman.gaussian(),
        "Gaussian, precision 5": bregman.gaussian(5.0),
        "Bernoulli": bregman.bernoulli(),
        "my own, cosh": bregman.BregmanPrior(
            torch.cosh,
            gradient=torch.sinh,
            inverse=torch.asinh,
            conjugate=lambda x: x * x.asinh() - (1.0 + x * x).sqrt(),
        ),
    }
    net = torch.nn.Linear(train.fields["x"].shape[-1], 1)
    torch.nn.init.zeros_(net.weight)
    for name, prior in priors.items():
        model = bregman_network(net, prior, likelihood=likelihood.bernoulli())
        method = pfedbred(
            model, "mh", prox=0.5, optimizer=SGD(0.05), global_optimizer=SGD(0.2), steps=10
        )
        scores = (
            hierfl.fit(
                method, train, rounds=rounds, seed=0, settings=hierfl.Settings(compile=False)
            )
            .predict(test, draws=1)
            .scores()
        )
        print(
            f"{name}: log score {scores.log_score.mean():.3f}, accuracy "
            f"{scores.accuracy.mean():.3f}"
        )


if __name__ == "__main__":
    main(rounds=2 if "--smoke" in sys.argv else 30)
