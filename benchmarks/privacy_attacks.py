"""Rows read off a round, and rows recognized in it.

Run `python -m benchmarks.privacy_attacks [--write]`.

What the attacker sees of one round of FedAvg (one step of gradient descent on all rows, from
weights that he knows) is a client's update; or the mean over all clients, as with secure
aggregation; or that mean with the noise of differential privacy. He knows the method and the model.

Reading: clients of one row each. The change of the weights over the change of the intercept is read
as the row; the table gives the largest error of a feature, in its standard deviations, from the
nearest client's row, as the median over 20 federations. 0 is the row itself; a random row is as far
from the nearest as the last line says.

Recognizing: a third of each hospital's patients (heart disease) train. The attacker has the records
of another third, from which he knows how gradients of a record are distributed there, and a record
of which he asks whether it trained: of those that did, or of the last third. He scores it by the
inner product of its gradient with the hospital's (or all hospitals') mean gradient, both less their
expectation, in the metric of their covariance. The table gives the AUC of that score, mean and sd
over 20 splits and noises; 0.5 is a guess. With --write both tables go to docs/disclosure.md.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor, nn

import hierfl
from benchmarks.page_tables import Titled, put_tables
from hierfl.method import Method
from hierfl.methods import differentially_private, fedavg
from hierfl.methods.wrappers.differentially_private import noise_for_epsilon
from hierfl.models import likelihood, network
from hierfl.optimizers import SGD

PAGE = Path(__file__).parents[1] / "docs" / "disclosure.md"
REPEATS = 20
FEATURES, CLIENTS = 4, 20
EPSILONS = (32.0, 8.0, 1.0)
CLIP = 1.0

Protection = Callable[[Method, int, int], Method]  # (method, clients, seed) -> method


def with_budget(epsilon: float) -> Protection:
    """Return the method with a budget for one round of all clients."""

    def protected(method: Method, clients: int, seed: int) -> Method:
        noise = noise_for_epsilon(epsilon, clients=clients, cohort=clients, rounds=1)
        return differentially_private(
            method, clipping_norm=CLIP, noise_multiplier=noise, secret=seed
        )

    return protected


def plain(method: Method, clients: int, seed: int) -> Method:
    """Return the method itself."""
    return method


def moved(data: hierfl.ClientData, protect: Protection, seed: int) -> tuple[Tensor, Tensor]:
    """Return how far one round moves the weights, (features,), and the intercept, ()."""
    torch.manual_seed(0)
    net = nn.Linear(data.fields["x"].shape[1], 1)
    method = fedavg(
        network(net, likelihood=likelihood.bernoulli()),
        optimizer=SGD(1.0),
        steps=1,
        batch_size=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single round, and clients of one row
        fitted = hierfl.fit(
            protect(method, data.num_clients, seed), data, rounds=1, seed=seed, progress=False
        )
    after = fitted.message
    weight = (after["theta.weight"] - net.weight.detach())[0]
    return weight, (after["theta.bias"] - net.bias.detach())[0]


# ------------------------------------------------------------------------------------------------
# reading
def rows_of_one(seed: int, clients: int) -> hierfl.ClientData:
    """Return clients of one row each."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, FEATURES, generator=g)
    y = (torch.rand(clients, generator=g) < 0.5).float()
    return hierfl.ClientData.from_arrays(torch.arange(clients), x=x, y=y)


def error_of(reading: Tensor, rows: Tensor) -> float:
    """Return the largest error of a feature from the nearest row."""
    return float((rows - reading).abs().max(1).values.min())


def read(clients: int, protect: Protection) -> float:
    """Return the median error of what is read off a round."""
    errors = []
    for seed in range(REPEATS):
        data = rows_of_one(seed, clients)
        weight, bias = moved(data, protect, seed)
        errors.append(error_of(weight / bias, data.fields["x"]))
    return float(np.median(errors))


def at_random() -> float:
    """Return the median distance of a random row from the nearest of all clients' rows."""
    g = torch.Generator().manual_seed(99)
    return float(
        np.median(
            [
                error_of(torch.randn(FEATURES, generator=g), rows_of_one(s, CLIENTS).fields["x"])
                for s in range(REPEATS)
            ]
        )
    )


def reading() -> Titled:
    """Return the table of what is read off a round."""
    found = {
        "a client's update": read(1, plain),
        "the mean of 3 clients (secure aggregation)": read(3, plain),
        f"the mean of {CLIENTS} clients (secure aggregation)": read(CLIENTS, plain),
        **{
            f"the mean of {CLIENTS}, epsilon {epsilon:g}": read(CLIENTS, with_budget(epsilon))
            for epsilon in EPSILONS
        },
        "a random row": at_random(),
    }
    return tabled("Rows read off one round of clients with one row", "error, sd", found, "{:.2g}")


# ------------------------------------------------------------------------------------------------
# recognizing
def gradients(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of each row's log likelihood, (n, features + 1)."""
    residual = y - (x @ weight + bias).sigmoid()
    return residual[:, None] * torch.cat([x, torch.ones(len(x), 1)], 1)


def recognized(alone: bool, protect: Protection, seed: int) -> float:
    """Return the AUC with which the patients of a round are told from the others, mean over hospitals."""
    members, left = hierfl.datasets.heart_disease().split(1 / 3, seed=seed)
    others, known = left.split(0.5, seed=seed)
    torch.manual_seed(0)
    net = nn.Linear(members.fields["x"].shape[1], 1)
    weight, bias = net.weight.detach()[0], net.bias.detach()[0]
    together = None if alone else torch.hstack(moved(members, protect, seed))
    found = []
    for name in members.names:
        mine = members.select([name])
        seen = torch.hstack(moved(mine, protect, seed)) if together is None else together
        inside, outside, reference = (
            gradients(weight, bias, part.fields["x"], part.fields["y"].float()).double()
            for part in (mine, others.select([name]), known.select([name]))
        )
        middle = reference.mean(0)
        spread = torch.linalg.pinv(torch.cov(reference.T), rtol=1e-3, hermitian=True)
        along = spread @ (seen.double() - middle)
        scores = [((each - middle) @ along).numpy() for each in (inside, outside)]
        u = mannwhitneyu(*scores).statistic
        found.append(float(u) / (len(scores[0]) * len(scores[1])))
    return float(np.mean(found))


def recognizing() -> Titled:
    """Return the table of how well patients are recognized in a round."""
    ways: dict[str, tuple[bool, Protection]] = {
        "a hospital's update": (True, plain),
        "the mean of 4 hospitals (secure aggregation)": (False, plain),
        **{
            f"the mean of 4, epsilon {epsilon:g}": (False, with_budget(epsilon))
            for epsilon in EPSILONS
        },
    }
    found = {
        said: np.array([recognized(alone, protect, seed) for seed in range(REPEATS)])
        for said, (alone, protect) in ways.items()
    }
    title = "Patients recognized in one round of the four hospitals"
    return tabled(
        title, "AUC", {k: f"{v.mean():.3f} ± {v.std(ddof=1):.3f}" for k, v in found.items()}, "{}"
    )


def tabled(title: str, column: str, found: dict[str, float] | dict[str, str], form: str) -> Titled:
    """Return a table of one column."""
    rows = [(said, form.format(value)) for said, value in found.items()]
    for row in rows:
        print(*row, sep=": ", flush=True)
    frame = pd.DataFrame(rows, columns=["the attacker sees", column])
    return Titled(title, frame.set_index("the attacker sees"))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy_attacks")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    write = parser.parse_args(argv).write
    found = [reading(), recognizing()]
    if write:
        put_tables(PAGE, "privacy attacks", *found)


if __name__ == "__main__":
    main()
