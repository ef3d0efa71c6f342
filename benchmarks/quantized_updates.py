"""What rounded updates cost in accuracy, and save in bytes.

Run `python -m benchmarks.quantized_updates`.

FedAvg of a network with one hidden layer on scikit-learn's 8 x 8 digits, twenty clients that have
mostly a few digits each (Dirichlet 0.3), 40 rounds of 10 steps. Each line is the same runs with
`hierfl.methods.quantized`, of three seeds of the start, the split and the mini-batches. Prints the
table of docs/wrappers.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hierfl
from hierfl.data.partition import dirichlet
from hierfl.method import Method
from hierfl.methods import fedavg, quantized
from hierfl.models import network
from hierfl.optimizers import SGD

SEEDS = (0, 1, 2)
TRAIN, CLIENTS, ROUNDS = 1200, 20, 40
LINES: dict[str, Callable[[Method], Method]] = {
    "32": lambda m: m,
    "16": lambda m: quantized(m, bits=16),
    "8": lambda m: quantized(m),
    "8, `feedback=False`": lambda m: quantized(m, feedback=False),
}


def measured(wrap: Callable[[Method], Method], seed: int) -> tuple[Tensor, float, int]:
    """Return the weights after the last round, the accuracy on other images, and the bytes up a round."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]
    who = dirichlet(y[:TRAIN], num_clients=CLIENTS, alpha=0.3, seed=seed)
    train = hierfl.ClientData.from_arrays(who, x=x[:TRAIN], y=y[:TRAIN])
    test = hierfl.ClientData.from_arrays(["all"] * (len(y) - TRAIN), x=x[TRAIN:], y=y[TRAIN:])
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    plain = fedavg(network(net), optimizer=SGD(0.2), steps=10, unit="step", batch_size=20)
    fitted = hierfl.fit(wrap(plain), train, rounds=ROUNDS, seed=seed)
    scores = fitted.personalize(test, rounds=0).predict(test).scores()
    weights = torch.cat([v.reshape(-1) for v in fitted.message.values()])
    return weights, float(scores["accuracy"].mean()), int(fitted.history["bytes_up"][0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    described = __doc__ or ""
    argparse.ArgumentParser(description=described.splitlines()[0]).parse_args(arguments)
    print("| bits | kB up a round | accuracy, three seeds | distance from the 32-bit weights |")
    print("|---|---:|---|---:|")
    first: list[Tensor] = []
    for name, wrap in LINES.items():
        runs = [measured(wrap, seed) for seed in SEEDS]
        first = first or [weights for weights, _, _ in runs]
        far = sum(
            float((run[0] - one).norm() / one.norm()) for run, one in zip(runs, first, strict=True)
        )
        accuracy = ", ".join(f"{run[1]:.3f}" for run in runs)
        print(f"| {name} | {runs[0][2] / 1e3:.1f} | {accuracy} | {far / len(runs):.1e} |")


if __name__ == "__main__":
    main()
