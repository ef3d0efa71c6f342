"""What client-level differential privacy costs in accuracy.

Run `python -m benchmarks.privacy_budgets [--write]`.

Fashion-MNIST, dealt at random to 2,000 clients of 30 rows; multinomial logistic regression by
FedAvg (10 steps of 30 rows at step size 0.1, 40 rounds with 500 clients each); accuracy on the
10,000 test rows, three seeds, of which each has its own deal and its own noise. The clip is the
same for all budgets: it was chosen from 0.3, 1 and 3, at epsilon 8 on another deal of the same
images (--clips), which is not counted in the budget. With --write the table goes to
docs/differential_privacy.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

import hierfl
from benchmarks.page_tables import Titled, put_tables
from hierfl.methods import differentially_private, fedavg
from hierfl.methods.wrappers.differentially_private import default_delta, noise_for_epsilon
from hierfl.models import network
from hierfl.optimizers import SGD
from hierfl.studies import image_splits as images

CLIENTS, ROWS, COHORT, ROUNDS, STEPS, LR = 2000, 30, 500, 40, 10, 0.1
BUDGETS: tuple[float | None, ...] = (None, 16.0, 8.0, 4.0, 2.0, 1.0)
CLIPS = (0.3, 1.0, 3.0)
CLIP = 1.0
PAGE = Path(__file__).parents[1] / "docs" / "differential_privacy.md"


def deal(seed: int) -> tuple[hierfl.ClientData, torch.Tensor, torch.Tensor]:
    """Return the clients' rows, and the rows of the test: features and labels."""
    rows = images.labeled("fashion_mnist")
    order = torch.randperm(len(rows.y), generator=torch.Generator().manual_seed(seed))
    used, test = order[: CLIENTS * ROWS], order[CLIENTS * ROWS :]
    ids = torch.arange(CLIENTS).repeat_interleave(ROWS)
    return (
        hierfl.ClientData.from_arrays(ids, x=rows.x[used], y=rows.y[used]),
        rows.x[test],
        rows.y[test],
    )


def accuracy(epsilon: float | None, seed: int, clip: float = CLIP) -> tuple[float, float]:
    """Return the accuracy in % on rows of no client, and the noise."""
    data, x, y = deal(seed)
    torch.manual_seed(seed)
    net = nn.Linear(x.shape[1], 10)
    method = fedavg(network(net), optimizer=SGD(LR), steps=STEPS, unit="step", batch_size=ROWS)
    noise = 0.0
    if epsilon is not None:
        noise = noise_for_epsilon(epsilon, clients=CLIENTS, cohort=COHORT, rounds=ROUNDS)
        method = differentially_private(
            method, clipping_norm=clip, noise_multiplier=noise, secret=seed
        )
    fitted = hierfl.fit(method, data, rounds=ROUNDS, cohort=COHORT, seed=seed, progress=False)
    found = fitted.message
    logits = x @ found["theta.weight"].T + found["theta.bias"]
    return 100.0 * float((logits.argmax(1) == y).double().mean()), noise


def table(seeds: int) -> Titled:
    """Return accuracy and noise at each budget."""
    rows = []
    for epsilon in BUDGETS:
        each = [accuracy(epsilon, seed) for seed in range(seeds)]
        found, noise = np.array([run[0] for run in each]), each[0][1]
        said = "no noise, no clip" if epsilon is None else f"{epsilon:g}"
        rows.append((said, f"{noise:.1f}", f"{found.mean():.1f} ± {found.std(ddof=1):.1f}"))
        print(*rows[-1], flush=True)
    delta = default_delta(CLIENTS)
    return Titled(
        f"Accuracy on rows of no client by budget, at delta {delta:.1e}",
        pd.DataFrame(rows, columns=["epsilon", "noise, in clips", "accuracy, %"]).set_index(
            "epsilon"
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy_budgets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clips", action="store_true", help="compare clips at epsilon 8, seed 100")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    args = parser.parse_args(argv)
    if args.clips:
        for clip in CLIPS:
            print(f"clip {clip}: {accuracy(8.0, 100, clip)[0]:.1f}%", flush=True)
        return
    found = table(args.seeds)
    if args.write:
        put_tables(PAGE, "privacy budgets", found)


if __name__ == "__main__":
    main()
