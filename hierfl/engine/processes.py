"""Chunks of clients on processes of their own, one core each: nothing waits at a barrier, nor for Python's one lock.

The processes are copies (forks) of this one, made once what is worked on is compiled: programs, data and compiled steps are there
already, and only what a round changes goes along a line between the two. Threads in their place gained next to nothing: between
two of its operations each waits for the lock that the other holds. What goes along a line is pickled: both ends are this program, and
nothing of it is kept, nor comes from elsewhere.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")
RunAll = Callable[[Iterable[Item]], Iterator[Result]]

CAN_COPY = sys.platform.startswith("linux")  # elsewhere system libraries do not survive a fork


class WorkerDied(RuntimeError):
    """A process that worked on a chunk of clients has ended before it was done."""


@contextmanager
def crew(task: Callable[[Item], Result], cores: int) -> Iterator[RunAll[Item, Result]]:
    """`work(items)` gives `task(item)` for each item in order, `cores` at once, each on one core; for as long as the context lasts.

    Args:
        task: pure: what it changes here it does not change in a copy of this process. Its items and results are trees of tensors.
        cores: how many items at once. With one, and where no process can be copied, all is done here, on as many cores as torch is told.

    The first call does everything here, so that what is compiled on the way is there when copies are made. Items are taken as
    they are needed, and results handed over as they come, `cores` at a time. An error of a task comes out here.
    """
    copies: list[Copy] = []
    wanted, ready = cores - 1, False

    def work(items: Iterable[Item]) -> Iterator[Result]:
        nonlocal wanted, ready
        if cores < 2 or not CAN_COPY:
            yield from map(task, items)
            return
        if ready and len(copies) < wanted:
            try:
                while len(copies) < wanted:
                    copies.append(copied(task, copies))
            except OSError as error:
                warnings.warn(
                    f"{len(copies) + 1} processes work where {cores} could: the system makes no more ({error})",
                    stacklevel=2,
                )
                wanted = len(copies)
        rest = iter(items)
        with one_core():
            while some := list(islice(rest, len(copies) + 1)):
                for copy, item in zip(copies, some[1:], strict=False):
                    copy.send(item)
                yield task(some[0])
                for copy, _ in zip(copies, some[1:], strict=False):
                    yield copy.receive()
        ready = True

    try:
        yield work
    finally:
        for copy in copies:
            copy.end()


@contextmanager
def one_core() -> Iterator[None]:
    """Torch's operations run on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of this process that does a task on what it is sent."""

    process: int
    line: socket.socket

    def send(self, item: object) -> None:
        """Hand over an item."""
        try:
            send(self.line, item)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        """Wait for the result; an error of the task is raised here."""
        try:
            done, answer = receive(self.line)
        except (EOFError, OSError) as error:
            raise self._died() from error
        if done:
            return answer
        raise answer

    def end(self) -> None:
        """Nothing of what it does is wanted any more."""
        self.line.close()
        try:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has gone, and somebody has asked how

    def _died(self) -> WorkerDied:
        return WorkerDied(
            f"a process that worked on a chunk of clients (PID {self.process}) has gone before it was done, as it would if the "
            f"system were out of memory: call torch.set_num_threads(1) to work in one process alone, or lower chunk"
        )


def copied(task: Callable[[Any], object], others: Iterable[Copy]) -> Copy:
    """Make a copy of this process that does a task until its line is cut: by us, or because we are no more."""
    here, there = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12's, of threads: none of ours holds a lock of a task
        try:
            process = os.fork()
        except OSError:
            here.close()
            there.close()
            raise
    if process:
        there.close()
        return Copy(process, here)
    try:
        for end in (here, *(other.line for other in others)):
            end.close()  # else they would stay open for as long as this copy lives, and others not learn that we are no more
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts us ends this copy
        torch.set_num_threads(1)
        _serve(task, there)
    finally:
        os._exit(0)  # nothing of ours is cleaned up, nor written, twice


def _serve(task: Callable[[Any], object], line: socket.socket) -> None:
    while True:
        try:
            item = receive(line)
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, object] = (True, task(item))
        except Exception as error:
            answer = (
                False,
                error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}"),
            )
        try:
            send(line, answer)
        except OSError:
            return


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


# ------------------------------------------------------------------------------------------------ what goes along a line
def send(line: socket.socket, tree: object) -> None:
    """Send a tree: what it is made of, and then its tensors' bytes as they lie in memory."""
    file, parts = io.BytesIO(), list[memoryview]()
    _Pickler(file, parts).dump(tree)
    head = file.getbuffer()
    sizes = [len(head), *map(len, parts)]
    line.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes))
    for part in (head, *parts):
        line.sendall(part)


def receive(line: socket.socket) -> Any:
    """Wait for a tree.

    Raises:
        EOFError: the other end is closed.
    """
    [count] = struct.unpack("<Q", _taken(line, 8))
    sizes = struct.unpack(f"<{count}Q", _taken(line, 8 * count))
    head, *parts = [_taken(line, size) for size in sizes]
    return pickle.loads(head, buffers=parts)


def _taken(line: socket.socket, size: int) -> Any:
    found: Any = torch.empty(
        size, dtype=torch.uint8
    ).numpy()  # which begins where vector instructions like it to
    rest = memoryview(found)
    while rest:
        got = line.recv_into(rest)
        if not got:
            raise EOFError("the other end is closed")
        rest = rest[got:]
    return found


class _Pickler(pickle.Pickler):
    """Puts the bytes of tensors aside."""

    def __init__(self, file: io.BytesIO, parts: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda part: parts.append(part.raw()))

    def reducer_override(self, value: object) -> Any:
        """A tensor is its bytes, type and shape; all else is as ever."""
        if type(value) is not Tensor:
            return NotImplemented
        numbers: Any = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(data, dtype=dtype).view(shape)
        if len(data)
        else torch.empty(shape, dtype=dtype)
    )
