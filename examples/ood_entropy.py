"""Does a model know what it does not know? Handwritten digits 0 to 7 at 16 clients; 8 and 9 are what none of them has seen.

python examples/ood_entropy.py [--smoke]     (Fashion-MNIST against letters, with densities: hierfl study ood-entropy)
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import hierfl
from hierfl import methods, models
from hierfl.optimisers import SGD


def two_digits_each() -> tuple[hierfl.ClientData, torch.Tensor]:
    """The digits 0 to 7 at clients of two classes each, and the images of 8 and 9; pixels in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    images, known = torch.tensor(x / 16.0, dtype=torch.float32), y < 8
    ids = hierfl.partition.pathological(y[known], num_clients=16, classes_per_client=2, seed=0)
    return hierfl.partition.to_clients(ids, x=images[known], y=y[known]), images[~known]


def entropy(p: torch.Tensor) -> torch.Tensor:
    """-sum_c p_c log p_c of each row, in nats."""
    return -torch.xlogy(p, p).sum(-1)


def main(rounds: int = 12) -> None:
    """A point, and two ways to a posterior of the same logistic regression; entropy of what each client predicts."""
    data, strangers = two_digits_each()
    train, test = data.split(0.7, seed=0)
    unseen = hierfl.ClientData.from_clients(
        {name: {"x": strangers} for name in train.names}
    )  # every client is asked of them all
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    hierarchy = models.bayesian_network(net, prior_scale="learned", scale_start=0.05)
    fits = {
        "a point (FedAvg, fine-tuned)": methods.fine_tuned(
            methods.fedavg(
                models.network(net), optimiser=SGD(0.1), steps=2, unit="epoch", batch_size=20
            ),
            optimiser=SGD(0.1),
        ),
        "pFedBayes": methods.pfedbayes(
            hierarchy, zeta=0.05, lr=0.01, eta=0.01, steps=6, batch_size=20
        ),
        "FedABML": methods.fedabml(
            hierarchy, lam=0.01, lr=0.1, eta=0.5, inner_steps=3, draws=1, steps=2, batch_size=20
        ),
    }
    for name, method in fits.items():
        fit = hierfl.fit(method, train, rounds=rounds, cohort=8, seed=0).personalise(
            train, rounds=5
        )
        known, unknown = (entropy(fit.predict(rows, draws=20).mean) for rows in (test, unseen))
        is_unknown = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
        auroc = roc_auc_score(is_unknown, torch.cat([known, unknown]))
        right = 100.0 * fit.predict(test, draws=20).scores().accuracy.mean()
        print(
            f"{name}: {right:.1f} % right; entropy {known.mean():.2f} nats on its own digits, {unknown.mean():.2f} on others, "
            f"AUROC {auroc:.3f}"
        )


if __name__ == "__main__":
    main(rounds=2 if "--smoke" in sys.argv else 12)
