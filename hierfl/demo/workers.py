"""Worker processes of the demo and of studies, which end with the process that started them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import torch


@contextmanager
def beside(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` over `workers` processes, or a lazy one in this process if `workers` is 1."""
    if workers <= 1:
        yield map
        return
    with ProcessPoolExecutor(
        workers,
        get_context("spawn"),
        initializer=set_up_worker,
        initargs=(torch.get_default_dtype(),),
    ) as pool:
        yield pool.map


def set_up_worker(dtype: torch.dtype) -> None:
    """Give a worker a default dtype and one thread, and end it with its parent."""
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends: a worker whose parent was killed would wait forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
