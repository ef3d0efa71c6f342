"""Does a model know what it does not know? 16 clients have the digits 0 to 7; 8 and 9 are unknown to all.

Usage: `python examples/ood_entropy.py [--smoke]`.

`hierfl compare examples/studies/fedabml-figures-5-6.toml` is the full study, on Fashion-MNIST
against letters and digits, with densities of entropy.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import hierfl
from hierfl import methods, models
from hierfl.optimizers import SGD, Adam


def two_digits_each() -> tuple[hierfl.ClientData, torch.Tensor]:
    """Return digits 0 to 7 at 16 clients of two classes each, and images of 8 and 9; pixels are in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    images, known = torch.tensor(x / 16.0, dtype=torch.float32), y < 8
    ids = hierfl.partition.pathological(y[known], num_clients=16, classes_per_client=2, seed=0)
    return hierfl.partition.to_clients(ids, x=images[known], y=y[known]), images[~known]


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Return the entropy -sum_c p_c log p_c of each row (n, classes), in nats."""
    return -torch.xlogy(p, p).sum(-1)


def main(rounds: int = 12) -> None:
    """Compare the entropy of predictions by a point estimate and two posteriors of logistic regression."""
    data, strangers = two_digits_each()
    train, test = data.split(0.7, seed=0)
    # Every client predicts all of the unknown digits.
    unseen = hierfl.ClientData.from_clients({name: {"x": strangers} for name in train.names})
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    hierarchy = models.bayesian_network(net, prior_scale="learned", scale_start=0.05)
    fits = {
        "point estimate (FedAvg, fine-tuned)": methods.fine_tuned(
            methods.fedavg(models.network(net), optimizer=SGD(0.1), steps=20, batch_size=20),
            optimizer=SGD(0.1),
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
            optimizer=SGD(0.1),
            inner_steps=5,
            draws=1,
            steps=4,
            unit="step",
            batch_size=20,
        ),
    }
    for name, method in fits.items():
        fit = hierfl.fit(method, train, rounds=rounds, cohort=8, seed=0).personalize(
            train, rounds=5
        )
        known, unknown = (entropy(fit.predict(rows, draws=20).mean) for rows in (test, unseen))
        is_unknown = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
        auroc = roc_auc_score(is_unknown, torch.cat([known, unknown]))
        right = 100.0 * fit.predict(test, draws=20).scores().accuracy.mean()
        print(
            f"{name}: accuracy {right:.1f} %; entropy {known.mean():.2f} nats on the client's own "
            f"digits, {unknown.mean():.2f} on unknown ones; AUROC {auroc:.3f}"
        )


if __name__ == "__main__":
    main(rounds=2 if "--smoke" in sys.argv else 12)
