"""Strange data sets that only a fit meets: labels, scales, names, and rows to predict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl import ClientBatch, ClientData, guides

Parts = tuple[Callable[[], Any], tuple[str, ...], Callable[[Any], bool] | None]
Ids = list[str]
Numbers = list[float]
Matrix = list[list[float]]


def logistic(batch: ClientBatch) -> None:
    """Local slopes, and 0/1 labels y."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


def normal(batch: ClientBatch) -> None:
    """Local slopes, and real labels y."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def classes(batch: ClientBatch) -> None:
    """Local logits of 3 classes, and labels y."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Categorical(logits=w), obs=batch.y)


def fitted(model: Any, ids: Ids, x: Any, y: Any, **fields: Any) -> hierfl.Fit:
    """Return a fit of one round."""
    data = ClientData.from_arrays(ids, x=x, y=y, **fields)
    method = hierfl.methods.fedsvi(model, guides.delta)
    return hierfl.fit(
        method, data, rounds=1, settings=hierfl.Settings(compile=False), progress=False
    )


def modes(fit: hierfl.Fit) -> dict[str, list[float]]:
    """Return the clients' modes by name."""
    table = fit.progress.table
    leaves = torch.utils._pytree.tree_leaves(table)
    flat = torch.cat([v.flatten(1) if v.dim() > 1 else v[:, None] for v in leaves], 1)
    return dict(zip(fit.clients, flat.double().tolist(), strict=True))


def labels_of_another_dtype(ids: Ids, y: Numbers, x: Matrix, rng: np.random.Generator) -> Parts:
    """0/1 labels as integers, booleans or objects: the same fit as with floats."""
    ones = [float(v > 0) for v in y]
    kinds: list[Any] = [np.int8, np.uint8, bool, np.int64, object, np.float16]
    labels = np.array(ones).astype(kinds[int(rng.integers(len(kinds)))])
    clean = modes(fitted(logistic, ids, x, ones))
    return partial(fitted, logistic, ids, x, labels), ("'y'",), lambda fit: modes(fit) == clean


def rows_in_another_order(ids: Ids, y: Numbers, x: Matrix, rng: np.random.Generator) -> Parts:
    """Clients in another order: the same fit of each."""
    order = sorted(range(len(ids)), key=lambda i: (ids[i][::-1], i), reverse=False)
    clean = modes(fitted(normal, ids, x, y))

    def make() -> hierfl.Fit:
        return fitted(normal, [ids[i] for i in order], [x[i] for i in order], [y[i] for i in order])

    return make, ("'y'",), lambda fit: modes(fit) == clean


def labels_to_refuse(ids: Ids, y: Numbers, x: Matrix, rng: np.random.Generator) -> Parts:
    """Labels with a column too many, from 1, out of range, missing, or infinite."""
    whole = np.arange(len(ids)) % 3
    made: list[tuple[Any, Any]] = [
        (normal, np.array(y)[:, None]),
        (classes, whole + 1),
        (classes, np.eye(3)[whole]),
        (classes, whole - 1),
        (classes, whole + 0.5),
        (logistic, whole),
        (normal, [*y[:-1], float("nan")]),
        (normal, [*y[:-1], float("inf")]),
        (normal, [*y[:-1], None]),
    ]
    model, labels = made[int(rng.integers(len(made)))]
    return partial(fitted, model, ids, x, labels), ("'y'",), None


def fields_to_refuse(ids: Ids, y: Numbers, x: Matrix, rng: np.random.Generator) -> Parts:
    """Fields of reserved names, and features with too few columns or missing values."""
    wide = np.array(x)
    wide[-1, 0] = np.nan
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: fitted(normal, ids, x, y, counts=y), "'counts'"),
        (lambda: fitted(normal, ids, x, y, rows=y), "'rows'"),
        (lambda: fitted(normal, ids, x, y, _x=y), "'_x'"),
        (lambda: fitted(normal, ids, wide, y), "'x'"),
        (lambda: fitted(normal, ids, np.array(x)[:, :2], y), "x "),
    ]
    make, thing = made[int(rng.integers(len(made)))]
    return make, (thing,), None


def arguments_to_refuse(ids: Ids, y: Numbers, x: Matrix, rng: np.random.Generator) -> Parts:
    """Other things than a method and its data."""
    data = ClientData.from_arrays(ids, x=x, y=y)
    method = hierfl.methods.fedsvi(normal, guides.delta)
    run: Any = partial(
        hierfl.fit, rounds=1, settings=hierfl.Settings(compile=False), progress=False
    )
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: run(data, method), "swapped"),
        (lambda: run(normal, data), "method"),
        (lambda: run(method, {"x": x, "y": y}), "data"),
        (lambda: run(method, torch.tensor(x)), "data"),
        (lambda: run(method, data, validation=[1]), "validation"),
        (lambda: run(method, data, seed=0.5), "seed"),
        (lambda: run(method, data.without("x")), "'x'"),
        (lambda: run(method, data).predict(data.with_fields(x=torch.tensor(x)[:, :2])), "'x'"),
        (lambda: run(method, data).predict(x), "rows"),
    ]
    make, thing = made[int(rng.integers(len(made)))]
    return make, (thing,), None


FITS: tuple[Callable[[Ids, Numbers, Matrix, np.random.Generator], Parts], ...] = (
    labels_of_another_dtype,
    rows_in_another_order,
    labels_to_refuse,
    fields_to_refuse,
    arguments_to_refuse,
)
