"""Chunks of clients on threads of their own, one core each: nothing waits at a barrier, and a core that is taken slows only its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def in_order(work: Callable[[Part], Result], parts: Sequence[Part], threads: int) -> Iterator[Result]:
    """`work(part)` for each part, in their order whoever is done first: what is summed from it does not depend on who was.

    Args:
        work: holds what Python may do one at a time alone under a lock of its own; torch's operations run beside each other, each
            on one core.
        parts: what is to be done. One of them alone is done here, on as many cores as torch is told.
        threads: how many at once, and as many are held at most that nobody has asked for yet.
    """
    if threads < 2 or len(parts) < 2:
        yield from map(work, parts)
        return
    pool = _pool(threads)
    waiting: deque[Future[Result]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(work, part))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)  # nobody works on after an error, or after whoever asked has gone


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads on which torch uses one core each; what the caller's own thread uses stays as it is."""
    before = torch.get_num_threads()
    pool, all_here = ThreadPoolExecutor(threads, thread_name_prefix="hierfl"), Barrier(threads)

    def alone() -> None:
        torch.get_num_threads()  # which a thread takes from the process when it first asks, and would else ask later
        torch.set_num_threads(1)
        all_here.wait()

    wait([pool.submit(alone) for _ in range(threads)])
    torch.set_num_threads(before)  # for a thread, and for all that are yet to come
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads are not copied into a forked process
