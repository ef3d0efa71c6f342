"""Work on requests in a process of its own, which the system ends where one takes too much time or memory."""

import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import finalize

import torch

from hierfl.engine.processes import CAN_COPY, Copy, WorkerDied, copied, wait_for

STATUS = Path("/proc/self/status")
ALLOCATES = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "bad allocation")


class Limits(NamedTuple):
    """What one request may take: seconds, and bytes of memory beside what the node has loaded."""

    seconds: int
    memory: int


class TooMuch(RuntimeError):
    """A request takes more than the node's policy allows."""


class Supervised:
    """Does tasks in turn in a copy of this process, on Linux; a copy that takes too much is ended, and begun again."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task, self._turn = task, Lock()
        self._copy: Copy | None = None
        self._watch: Thread | None = None
        self._loaded = 0  # bytes, in the copy

    def __call__(self, item: Any, limits: Limits) -> Any:
        """Return what the task returns, or raise what it raises, or TooMuch."""
        if not CAN_COPY:
            return self._task(item)
        with self._turn:
            copy, began = self._started(), monotonic()
            try:
                copy.send((item, limits))
                return copy.receive()
            except (MemoryError, WorkerDied) as error:
                self._end(copy)
                late = monotonic() - began >= limits.seconds
                what = f"{limits.seconds:,} s" if late else f"{limits.memory:,} bytes of memory"
                key = "seconds_a_request" if late else "memory_a_request"
                raise TooMuch(f"it takes more than the {what} of the policy ({key})") from error
            except (KeyboardInterrupt, SystemExit):  # its answer would be taken for the next one
                self._end(copy)
                raise

    def _started(self) -> Copy:
        """Return the copy, or begin one in a thread of its own: torch waits for no threads that were not copied."""
        if self._copy is not None and self._watch is not None and not self._watch.is_alive():
            self._end(self._copy)  # the system has, for lack of memory
        if self._copy is None:
            begun, passed = Event(), list[Any]([self._bounded])
            arguments = (passed, torch.get_num_threads(), begun)
            self._watch = Thread(target=_watch, args=arguments, daemon=True)
            self._watch.start()
            begun.wait()
            if isinstance(copy := passed.pop(), OSError):
                raise copy
            self._copy = copy
            finalize(self, copy.line.close)  # which ends the copy
        return self._copy

    def _end(self, copy: Copy) -> None:
        self._copy = None
        copy.end()

    def _bounded(self, sent: tuple[Any, Limits]) -> Any:
        """Do the task in the copy, within limits that the system holds."""
        import resource  # not on Windows

        item, limits = sent
        if not self._loaded:  # as RLIMIT_DATA counts them
            (line,) = (of for of in STATUS.read_text().splitlines() if of.startswith("VmData:"))
            self._loaded = int(line.split()[1]) << 10
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = self._loaded + limits.memory
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        try:
            return self._task(item)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _watch(passed: list[Any], threads: int, begun: Event) -> None:
    """Begin a copy for the task that is passed, pass it back, and wait for its end: it ends with this thread."""
    try:
        passed.append(copied(passed.pop(), threads))
    except OSError as error:
        passed.append(error)
        return begun.set()
    process = passed[0].process  # and no name for the rest: a copy that nobody holds ends
    begun.set()
    wait_for(process)


def raise_if_memory(error: BaseException) -> None:
    """Raise MemoryError where an error, or what caused it, is that there is no more memory."""
    causes: list[BaseException | None] = [error]
    while causes:
        if (cause := causes.pop()) is not None:
            if isinstance(cause, MemoryError) or any(text in str(cause) for text in ALLOCATES):
                raise MemoryError from None
            causes += [cause.__cause__, cause.__context__]
