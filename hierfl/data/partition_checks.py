"""Checks of partitions' labels, seeds and ids, and the partitioners of flwr-datasets."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect_count, expect_integer
from hierfl.core.extras import extras_for
from hierfl.data.arrays import Array, masked_in

LEFT_OUT = -1

Ids = NDArray[np.int64]


def codes_of(labels: Array) -> tuple[NDArray[Any], Ids]:
    """Return the L classes in ascending order, and the index of each row's class, (n,) int64."""
    raw = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if masked_in(labels) or raw.ndim != 1 or len(raw) == 0:
        fix = "give one label per row, of shape (n,), and leave masked rows out"
        raise ValueError(f"labels have shape {raw.shape}, or are masked in some rows: {fix}")
    if raw.dtype.kind not in "iubU" and not all(isinstance(v, str) for v in raw):
        fix = "give integers, such as y.long(), or strings, none missing"
        raise TypeError(f"labels are of type {raw.dtype}: {fix}")
    classes, codes = np.unique(raw, return_inverse=True)
    return classes, codes.astype(np.int64)


def checked_ids(ids: Any) -> Tensor:
    """Return the ids of a partition, (n,) int64, refusing others than -1, 0, 1, ..."""
    tensor = torch.as_tensor(ids)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        fix = "give integers, as a partition returns them"
        raise TypeError(f"ids are {str(tensor.dtype).removeprefix('torch.')}: {fix}")
    is_right = tensor.dim() == 1 and len(tensor) and int(tensor.min()) >= LEFT_OUT
    if not is_right or int(tensor.max()) < 0:
        what = "a client is 0 or more, and a row that is left out is -1"
        raise ValueError(f"ids of shape {tuple(tensor.shape)} are not one per row, (n,): {what}")
    return tensor.long()


def check_clients(num_rows: int, num_clients: int, min_rows: int = 1) -> None:
    """Refuse numbers of clients and rows that no partition can have."""
    needed = expect_count(num_clients, "num_clients") * expect_count(min_rows, "min_rows")
    if needed > expect_integer(num_rows, "rows"):
        what = f"{num_clients} clients of at least {min_rows} rows need {needed} rows"
        raise ValueError(f"{what}, but there are {num_rows}")


def numpy_seed(seed: int) -> int:
    """Wrap a seed to 64 unsigned bits: NumPy refuses negative seeds."""
    return expect_integer(seed, "seed") & 0xFFFFFFFFFFFFFFFF


def generator_of(seed: int) -> np.random.Generator:
    """Return NumPy's counter-based generator of a seed."""
    return np.random.Generator(np.random.Philox(numpy_seed(seed)))


def from_flwr_datasets(
    kind: str, codes: Ids, num_clients: int, seed: int, advice: str, **options: Any
) -> Tensor:
    """Partition shuffled rows by flwr-datasets, which cuts each class in the order of its rows."""
    with extras_for("this partition"):
        import datasets
        from flwr_datasets import partitioner
    order = generator_of(seed).permutation(len(codes))
    maker = getattr(partitioner, f"{kind}Partitioner")(
        num_clients, "label", shuffle=False, seed=numpy_seed(seed), **options
    )
    shuffled = datasets.Dataset.from_dict({"label": codes[order], "row": order})
    maker.dataset = shuffled.with_format("numpy")
    ids = np.full(len(codes), LEFT_OUT)
    with warnings.catch_warnings():
        # Our docstrings document what the partitioners warn of: repeated draws, classes left out.
        warnings.simplefilter("ignore", UserWarning)
        try:
            for k in range(num_clients):
                ids[maker.load_partition(k)[:]["row"]] = k
        except ValueError as error:
            raise ValueError(f"{advice} ({error})") from error
    return filled(ids, num_clients)


def filled(ids: Ids, num_clients: int) -> Tensor:
    """Return the ids as a tensor, once every client is known to have a row."""
    counts = np.bincount(ids[ids >= 0], minlength=num_clients)
    if counts.min() == 0:
        fix = f"lower num_clients ({num_clients})"
        raise ValueError(f"client {int(counts.argmin())} is left without rows: {fix}")
    return torch.from_numpy(ids.astype(np.int64))
