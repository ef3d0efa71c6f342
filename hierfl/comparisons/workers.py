"""Worker processes of studies, which end with the process that started them."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from threading import Thread

import torch


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
