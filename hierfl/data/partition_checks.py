"""Checks of partitions' labels, seeds and ids, and the partitioners of flwr-datasets."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.extras import extras_for
from hierfl.data.arrays import Array

LEFT_OUT = -1

Ids = NDArray[np.int64]


def codes_of(labels: Array) -> tuple[NDArray[Any], Ids]:
    """Return the L classes in ascending order, and the index of each row's class, (n,) int64."""
    if isinstance(labels, np.ma.MaskedArray) and np.ma.getmaskarray(labels).any():
        raise ValueError("labels are masked in some rows: leave these rows out")
    raw = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if raw.ndim != 1 or len(raw) == 0:
        raise ValueError(f"labels have shape {raw.shape}: give one label per row, of shape (n,)")
    if raw.dtype.kind == "f":
        raise TypeError("labels are floating: give integers, such as y.long()")
    if raw.dtype.kind not in "iubU" and not all(isinstance(v, str) for v in raw):
        raise TypeError(f"labels hold {raw[0]!r}: give integers or strings, none missing")
    classes, codes = np.unique(raw, return_inverse=True)
    return classes, codes.astype(np.int64)


def checked_ids(ids: Any) -> Tensor:
    """Return the ids of a partition, (n,) int64, refusing others than -1, 0, 1, ..."""
    found = torch.as_tensor(ids)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(
            f"ids are {str(found.dtype).removeprefix('torch.')}: give integers, as a partition "
            f"returns them"
        )
    if found.dim() != 1:
        raise ValueError(f"ids have shape {tuple(found.shape)}: give one id per row, of shape (n,)")
    if len(found) == 0 or int(found.max()) < 0:
        raise ValueError("the partition gives no row to any client: give ids of 0 or more")
    if int(found.min()) < LEFT_OUT:
        raise ValueError(
            f"ids hold {int(found.min())}: a client is 0 or more, and a row that is left out is -1"
        )
    return found.long()


def check_clients(num_rows: int, num_clients: int, min_rows: int = 1) -> None:
    """Refuse numbers of clients and rows that no partition can have."""
    for name, value in (("num_clients", num_clients), ("min_rows", min_rows), ("rows", num_rows)):
        if not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}: it must be an integer")
    expect(num_clients=(num_clients, "[1, inf)"), min_rows=(min_rows, "[1, inf)"))
    if num_clients * min_rows > num_rows:
        raise ValueError(
            f"{num_clients} clients of at least {min_rows} rows need {num_clients * min_rows} "
            f"rows, but there are {num_rows}"
        )


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that no Dirichlet distribution has."""
    expect(alpha=(alpha, "(0, inf)"))


def numpy_seed(seed: int) -> int:
    """Wrap a seed to 64 unsigned bits: NumPy refuses negative seeds."""
    if not isinstance(seed, int | np.integer):
        raise TypeError(f"seed is {seed!r}: it must be an integer")
    return seed & 0xFFFFFFFFFFFFFFFF


def generator_of(seed: int) -> np.random.Generator:
    """Return NumPy's counter-based generator of a seed."""
    return np.random.Generator(np.random.Philox(numpy_seed(seed)))


def from_flwr_datasets(
    kind: str, codes: Ids, num_clients: int, seed: int, **options: Any
) -> Tensor:
    """Partition shuffled rows by flwr-datasets, which cuts each class in the order of its rows."""
    with extras_for("this partition"):
        import datasets
        from flwr_datasets import partitioner
    order = generator_of(seed).permutation(len(codes))
    maker = getattr(partitioner, f"{kind}Partitioner")(
        num_clients, "label", shuffle=False, seed=numpy_seed(seed), **options
    )
    maker.dataset = datasets.Dataset.from_dict({"label": codes[order], "row": order}).with_format(
        "numpy"
    )
    ids = np.full(len(codes), LEFT_OUT)
    with warnings.catch_warnings():
        # Our docstrings document what the partitioners warn of: repeated draws, classes left out.
        warnings.simplefilter("ignore", UserWarning)
        for k in range(num_clients):
            ids[maker.load_partition(k)[:]["row"]] = k
    return filled(ids, num_clients)


def filled(ids: Ids, num_clients: int) -> Tensor:
    """Return the ids as a tensor, once every client is known to have a row."""
    counts = np.bincount(ids[ids >= 0], minlength=num_clients)
    if counts.min() == 0:
        raise ValueError(
            f"client {int(counts.argmin())} is left without rows: lower num_clients ({num_clients})"
        )
    return torch.from_numpy(ids.astype(np.int64))
