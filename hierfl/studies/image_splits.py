"""The papers' splits of images into clients, standardised, and the networks they were given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hierfl import datasets
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import Scaling, fit_scaling
from hierfl.datasets import Labelled

Ids = NDArray[np.int64]


def merged(name: Literal["mnist", "fashion_mnist"]) -> Labelled:
    """Training and test rows of an image set together, (70,000, 784): each client splits its own.

    Raises:
        FileNotFoundError: the set is not there; the message says how to get it.
    """
    train, test = datasets.mnist() if name == "mnist" else datasets.fashion_mnist()
    return Labelled(
        torch.cat([train.x, test.x]).flatten(1), torch.cat([train.y, test.y]), train.classes
    )


def deal(
    images: Labelled,
    train: list[Ids],
    test: list[Ids],
    *,
    scaling: Literal["pixel", "one"] = "one",
    scaled_by: int | None = None,
) -> tuple[ClientData, ClientData, Scaling]:
    """The federation of given rows a client, its pixels scaled by those of the training rows, and that scaling.

    Args:
        images: all rows.
        train: rows of each client to train on.
        test: and to test on.
        scaling: mean and sd of each "pixel", or "one" mean and sd of them all.
        scaled_by: whose training rows mean and sd are of: the first so many clients'; None: all.
    """
    both = [
        ClientData.from_arrays(
            np.repeat(np.arange(len(rows)), [len(r) for r in rows]),
            names=[f"{k:03d}" for k in range(len(rows))],
            x=images.x[np.concatenate(rows)],
            y=images.y[np.concatenate(rows)],
        )
        for rows in (train, test)
    ]
    found = fit_scaling(both[0] if scaled_by is None else both[0].select(both[0].names[:scaled_by]))
    if scaling == "one":
        middle = found.mean.mean()
        total = (found.sd.square() + (found.mean - middle).square()).mean().sqrt()
        found = Scaling("x", middle.expand_as(found.mean), total.expand_as(found.sd))
    return found.apply(both[0]), found.apply(both[1]), found


def equal_classes(
    labels: Tensor, *, clients: int, classes: int, train: int, test: int, seed: int
) -> tuple[list[Ids], list[Ids]]:
    """Rows of clients with `classes` classes each, drawn at random so that every class has as many clients as any other.

    FedABML's Fashion-MNIST: 200 clients, 2 classes, of each 150 rows to train and 25 to test: all 70,000.

    Returns:
        Training and test rows of each client.

    Raises:
        ValueError: a class has too few rows.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    every = int(labels.max()) + 1
    hands = _hands(every, clients, classes, generator)
    rows = [generator.permutation(np.flatnonzero(labels.numpy() == c)) for c in range(every)]
    need = int(np.bincount(hands.flatten()).max()) * (train + test)
    if need > min(len(r) for r in rows):
        raise ValueError(
            f"a class has {min(len(r) for r in rows)} rows; {need} are needed for {clients} clients"
        )
    taken = [0] * every
    found: tuple[list[Ids], list[Ids]] = [], []
    for hand in hands:
        parts = []
        for c in hand:
            parts.append(rows[c][taken[c] : taken[c] + train + test])
            taken[c] += train + test
        found[0].append(np.concatenate([p[:train] for p in parts]))
        found[1].append(np.concatenate([p[train:] for p in parts]))
    return found


def _hands(every: int, clients: int, classes: int, generator: np.random.Generator) -> Ids:
    """(clients, classes) classes, none twice in a hand: a shuffled deck, whose doubles are swapped with cards of other hands."""
    deck = generator.permutation(np.resize(np.arange(every), clients * classes))
    hands = deck.reshape(clients, classes)
    while doubles := [k for k, hand in enumerate(hands) if len(set(hand)) < classes]:
        for k in doubles:
            here, there = (
                (k, generator.integers(classes)),
                (generator.integers(clients), generator.integers(classes)),
            )
            hands[here], hands[there] = hands[there], hands[here]
    return hands


def power_law(
    labels: Tensor, *, clients: int, classes: int, seed: int
) -> tuple[list[Ids], list[Ids]]:
    """PRIOR's split (and pFedMe's): client u has the classes (u + j) mod 10, 10 rows of each and then a log-normal quota.

    The quota of class l and its m-th client is `share * randint(1, 10) + randint(10, 200)` rows, `share` that client's part of
    the class by log-normal(0, 2) weights; it is left out where the class would run dry. 75 % of a client's rows train. From the
    authors' description and generator, redrawn by our own random numbers. Their MNIST script mislabels each client's first
    rows; this one does not.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    every = int(labels.max()) + 1
    rows = [generator.permutation(np.flatnonzero(labels.numpy() == c)) for c in range(every)]
    taken = [0] * every
    hands: list[list[Ids]] = [[] for _ in range(clients)]

    def take(u: int, c: int, count: int) -> None:
        hands[u].append(rows[c][taken[c] : taken[c] + count])
        taken[c] += count

    for u in range(clients):
        for j in range(classes):
            take(u, (u + j) % every, 10)
    owners = -(-clients // every)
    weights = generator.lognormal(0.0, 2.0, (every, owners, classes))
    left = np.array([len(r) - t for r, t in zip(rows, taken, strict=True)])
    shares = left[:, None, None] * weights / weights.sum((1, 2), keepdims=True)
    for u in range(clients):
        for j in range(classes):
            c = (u + j) % every
            count = int(shares[c, u // every, j] * generator.integers(1, 10) / 10) + int(
                generator.integers(10, 200)
            )
            if taken[c] + count <= len(rows[c]):
                take(u, c, count)
    mixed = [generator.permutation(np.concatenate(hand)) for hand in hands]
    cuts = [int(0.75 * len(hand)) for hand in mixed]
    return [m[:c] for m, c in zip(mixed, cuts, strict=True)], [
        m[c:] for m, c in zip(mixed, cuts, strict=True)
    ]


def mclr(features: int = 784, classes: int = 10) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Linear(features, classes)


def dnn(features: int = 784, classes: int = 10) -> nn.Module:
    """PRIOR's DNN: one hidden layer of 100, leaky ReLU."""
    return nn.Sequential(nn.Linear(features, 100), nn.LeakyReLU(0.1), nn.Linear(100, classes))


def started(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module whose first weights are drawn from a seed of their own: torch's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
