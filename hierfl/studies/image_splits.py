"""The papers' splits of image sets into clients, and standardization of pixels."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hierfl import datasets
from hierfl.core.extras import extras_for
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import Scaling, fit_scaling
from hierfl.datasets import Labeled

Ids = NDArray[np.int64]
FIRST = 10  # rows of each of its classes that a client gets first, by the power law
BLIND = 1000  # passes of swaps, whatever they do; most splits need fewer


@lru_cache(maxsize=1)
def labeled(name: str) -> Labeled:
    """Return all rows of an image set, x (n, pixels): both parts, and of "emnist" the test split alone."""
    if name == "digits":
        return digits()
    parts = (datasets.emnist_byclass_test(),) if name == "emnist" else getattr(datasets, name)()
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    return Labeled(x.flatten(1), y, parts[0].classes)


def digits() -> Labeled:
    """Return scikit-learn's digits, x (1797, 64) in [0, 1]."""
    with extras_for("digits"):
        from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    return Labeled(
        torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y).long(), tuple("0123456789")
    )


def dealt(images: Labeled, train: list[Ids], test: list[Ids]) -> tuple[ClientData, ClientData]:
    """Give each client its training and test rows, by one array of row numbers for each client."""

    def given(rows: list[Ids]) -> ClientData:
        return ClientData.from_arrays(
            np.repeat(np.arange(len(rows)), [len(own) for own in rows]),
            names=[f"{k:03d}" for k in range(len(rows))],
            x=images.x[np.concatenate(rows)],
            y=images.y[np.concatenate(rows)],
        )

    return given(train), given(test)


def scaling_of(train: ClientData, kind: Literal["pixel", "one", "none"]) -> Scaling:
    """Return the scaling: "pixel" by each column's mean and sd, "one" by those of all, "none"."""
    scaling = fit_scaling(train)
    if kind == "none":
        return Scaling("x", torch.zeros_like(scaling.mean), torch.ones_like(scaling.sd))
    if kind == "one":
        middle = scaling.mean.mean()
        total = (scaling.sd.square() + (scaling.mean - middle).square()).mean().sqrt()
        return Scaling("x", middle.expand_as(scaling.mean), total.expand_as(scaling.sd))
    return scaling


def equal_classes(
    labels: Tensor, *, clients: int, classes: int, train: int, test: int, seed: int
) -> tuple[list[Ids], list[Ids]]:
    """Split rows at random among clients; `train` and `test` rows of each of a client's `classes`."""
    generator = np.random.Generator(np.random.Philox(seed))
    hands = _classes_of_clients(int(labels.max()) + 1, clients, classes, generator)
    rows = _by_class(labels, generator)
    need, fewest = int(np.bincount(hands.flatten()).max()) * (train + test), min(map(len, rows))
    if need > fewest:
        raise ValueError(
            f"a class has {fewest} rows; {need} are needed for {clients} "
            "clients: use fewer clients, or fewer rows of a class"
        )
    blocks = [iter(of[:need].reshape(-1, train + test)) for of in rows]
    own = [[next(blocks[c]) for c in hand] for hand in hands]
    first = [np.concatenate([b[:train] for b in hand]) for hand in own]
    return first, [np.concatenate([b[train:] for b in hand]) for hand in own]


def shared_classes(
    labels: Tensor, *, clients: int, classes: int, share: float, seed: int
) -> tuple[list[Ids], list[Ids]]:
    """Split a share of each class equally among its clients, at least 7 rows each, a seventh for tests."""
    generator = np.random.Generator(np.random.Philox(seed))
    every = int(labels.max()) + 1
    hands = _classes_of_clients(every, clients, classes, generator)
    holders, blocks = np.bincount(hands.flatten(), minlength=every), []
    for c, (rows, count) in enumerate(zip(_by_class(labels, generator), holders, strict=True)):
        size = int(share * len(rows) / max(1, count))
        if count and size < 7:
            raise ValueError(
                f"class {c} has {len(rows)} rows, and {count} clients share {share:g} of "
                "them: 7 are needed for each, so use fewer clients, or more of the rows"
            )
        blocks.append(iter(rows[: count * size].reshape(count, size)[::-1]))
    own = [[next(blocks[c]) for c in hand] for hand in hands]
    train = [np.concatenate([b[len(b) // 7 :] for b in hand]) for hand in own]
    return train, [np.concatenate([b[: len(b) // 7] for b in hand]) for hand in own]


def _classes_of_clients(
    every: int, clients: int, classes: int, generator: np.random.Generator
) -> Ids:
    """Deal classes to clients, (clients, classes), swapping at random until none has a class twice."""
    if classes > every:
        raise ValueError(f"classes is {classes}, and the labels have {every}: use at most {every}")
    deck = generator.permutation(np.resize(np.arange(every), clients * classes))
    hands, passes = deck.reshape(clients, classes), 0
    while repeating := [k for k, own in enumerate(hands) if len(set(own)) < classes]:
        passes += 1
        for k in repeating:
            here = k, generator.integers(classes)
            there = generator.integers(clients), generator.integers(classes)
            swapped = [k, int(there[0])]
            before = hands.copy() if passes > BLIND else None
            hands[here], hands[there] = hands[there], hands[here]
            # with half of all classes or more at each client, blind swaps never end
            if before is not None and _different(hands[swapped]) < _different(before[swapped]):
                hands = before
    return hands


def _different(clients: Ids) -> int:
    return sum(len(set(own)) for own in clients)


def power_law(
    labels: Tensor, *, clients: int, classes: int, seed: int
) -> tuple[list[Ids], list[Ids]]:
    """Split rows among clients by PRIOR's power law, which is also pFedMe's.

    Client u has the classes (u + j) mod 10, j < `classes`: 10 rows of each, and then `share * a /
    10 + b` rows, a uniform on 1..9, b on 10..199, if so many are left. `share` is its part of the
    remaining rows by log-normal(0, 2) weights; 75% are for training. Random numbers are our own.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    rows = _by_class(labels, generator)
    every = len(rows)
    taken = [0] * every
    dealt: list[list[Ids]] = [[] for _ in range(clients)]

    def take(u: int, c: int, count: int) -> None:
        dealt[u].append(rows[c][taken[c] : taken[c] + count])
        taken[c] += count

    for u in range(clients):
        for j in range(classes):
            take(u, (u + j) % every, FIRST)
    owners = -(-clients // every)
    weights = generator.lognormal(0.0, 2.0, (every, owners, classes))
    remaining = np.array([len(r) - t for r, t in zip(rows, taken, strict=True)])
    shares = remaining[:, None, None] * weights / weights.sum((1, 2), keepdims=True)
    for u in range(clients):
        for j in range(classes):
            c = (u + j) % every
            count = int(shares[c, u // every, j] * generator.integers(1, 10) / 10)
            count += int(generator.integers(10, 200))
            if taken[c] + count <= len(rows[c]):
                take(u, c, count)
    mixed = [generator.permutation(np.concatenate(own)) for own in dealt]
    cut = [(own, int(0.75 * len(own))) for own in mixed]
    return [own[:c] for own, c in cut], [own[c:] for own, c in cut]


def authors_labels(labels: Tensor, *, clients: int, classes: int, seed: int) -> Tensor:
    """Return PRIOR's wrong MNIST labels: the first 10 rows of a client's class (u + j) mod 10 have label j."""
    rows, wrong = _by_class(labels, np.random.Generator(np.random.Philox(seed))), labels.clone()
    taken = [0] * len(rows)
    for u in range(clients):
        for j in range(classes):
            c = (u + j) % len(rows)
            wrong[rows[c][taken[c] : taken[c] + FIRST]] = j
            taken[c] += FIRST
    return wrong


def _by_class(labels: Tensor, generator: np.random.Generator) -> list[Ids]:
    every = int(labels.max()) + 1
    return [generator.permutation(np.flatnonzero(labels.numpy() == c)) for c in range(every)]


def started(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module whose weights depend on `seed` alone; leave torch's generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
