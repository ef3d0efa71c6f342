"""Chunks of clients on several processes, one core each: forks, made once local steps are compiled."""

import ctypes
import gc
import io
import os
import pickle
import signal
import socket
import stat
import struct
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from hierfl.core.user_warnings import warn

Item = TypeVar("Item")
Result = TypeVar("Result")
RunAll = Callable[[Iterable[Item]], Iterator[Result]]

# on other systems, system libraries do not survive a fork
CAN_COPY = sys.platform.startswith("linux")
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal a process is sent when the thread that made it ends
# looked up now: after a fork the loader's own lock may be held by a thread that was not copied
PRCTL: Any = getattr(ctypes.CDLL(None), "prctl", None) if CAN_COPY else None


class WorkerDied(RuntimeError):
    """A process that worked on a chunk of clients ended before it was done."""


@contextmanager
def crew(task: Callable[[Item], Result], cores: int) -> Iterator[RunAll[Item, Result]]:
    """Make a `run_all(items)` of a pure `task`: the first call runs here, the next in copies, `cores` at once."""
    copies: list[Copy] = []
    latest: list[Generator[Result, None, None]] = []
    count, ready = cores - 1, False

    def run_all(items: Iterable[Item]) -> Iterator[Result]:
        latest[:] = [results(items)]
        return latest[0]

    def results(items: Iterable[Item]) -> Generator[Result, None, None]:
        nonlocal count, ready
        if cores < 2 or not CAN_COPY:
            yield from map(task, items)
            return
        if ready and len(copies) < count:
            try:
                while len(copies) < count:
                    copies.append(copied(task))
            except OSError as error:
                warn(
                    f"{len(copies) + 1} processes work where {cores} could: the system cannot "
                    f"start more ({error})",
                )
                count = len(copies)
        remaining = iter(items)
        with one_core():
            while some := list(islice(remaining, len(copies) + 1)):
                for copy, item in zip(copies, some[1:], strict=False):
                    copy.send(item)
                yield task(some[0])
                for copy, _ in zip(copies, some[1:], strict=False):
                    yield copy.receive()
        ready = True

    try:
        yield run_all
    finally:
        for work in latest:
            work.close()  # a traceback may keep it for ever: torch would be left with one core
        for copy in copies:
            copy.kill()  # all of them first: an interrupt while one is waited for must spare none
        for copy in copies:
            copy.end()


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch use one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of this process that runs a task on the items it is sent through `line`."""

    process: int
    line: socket.socket

    def send(self, item: object) -> None:
        """Send an item; a `WorkerDied` where the process has ended."""
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

    def kill(self) -> None:
        """Terminate the process, without waiting until it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)

    def end(self) -> None:
        """Terminate the process, and wait until it has ended."""
        self.line.close()
        self.kill()
        wait_for(self.process)

    def _died(self) -> WorkerDied:
        return WorkerDied(
            f"a process that worked on a chunk of clients (PID {self.process}) ended before it was "
            "done, perhaps because the system is out of memory: call torch.set_num_threads(1) to "
            "use this process alone, or lower chunk"
        )


def wait_for(process: int) -> None:
    """Wait until a process of this one has ended."""
    with suppress(ChildProcessError):  # its exit status has been collected already
        os.waitpid(process, 0)


def copied(task: Callable[[Any], object], threads: int = 1) -> Copy:
    """Fork a process that runs a task on every item it is sent, and ends when this thread does."""
    here, there = socket.socketpair()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads; none of ours holds a lock that a task needs
        warnings.simplefilter("ignore", DeprecationWarning)
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
        _end_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted first process ends its copies
        _let_go_of_sockets(but=there.fileno())
        torch.set_num_threads(threads)
        gc.freeze()  # a collection would copy each page that holds an object of the first process
        _serve(task, there)
    finally:
        os._exit(0)  # without the clean-up at exit, which is the first process's alone


def _let_go_of_sockets(but: int) -> None:
    """Point the sockets of the first process at nothing: who is at their other end must notice that it closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # of the listing itself
            if number != but and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)  # not closed: an object of Python's has the number
    os.close(nothing)


def _end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, even by SIGKILL."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(0)


def _serve(task: Callable[[Any], object], line: socket.socket) -> None:
    """Run a task on every item that comes in, and send back (True, result) or (False, error)."""
    while True:
        try:
            item = receive(line)
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, object] = (True, task(item))
        except Exception as error:
            answer = (False, _sendable(error))
        try:
            send(line, answer)
        except OSError:
            return


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def send(line: socket.socket, tree: object) -> None:
    """Send a tree: its structure, and then the bytes of its tensors as they lie in memory."""
    file, parts = io.BytesIO(), list[memoryview]()
    _Pickler(file, parts).dump(tree)
    head = file.getbuffer()
    sizes = [len(head), *map(len, parts)]
    line.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes))
    for part in (head, *parts):
        line.sendall(part)


def receive(line: socket.socket) -> Any:
    """Wait for a tree and return it."""
    [count] = struct.unpack("<Q", _taken(line, 8))
    sizes = struct.unpack(f"<{count}Q", _taken(line, 8 * count))
    head, *parts = [_taken(line, size) for size in sizes]
    return pickle.loads(head, buffers=parts)


def _taken(line: socket.socket, size: int) -> Any:
    # torch aligns its memory for vector instructions
    content: Any = torch.empty(size, dtype=torch.uint8).numpy()
    view = memoryview(content)
    while view:
        got = line.recv_into(view)
        if not got:
            raise EOFError("the other end is closed")
        view = view[got:]
    return content


class _Pickler(pickle.Pickler):
    """Pickles trees, and puts the bytes of their tensors aside in `parts`."""

    def __init__(self, file: io.BytesIO, parts: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda part: parts.append(part.raw()))

    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        numbers: Any = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)
