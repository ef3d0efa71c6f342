"""The lock on a run's folder: one writer at a time, and the next one learns who holds it.

The lock is the system's (`flock`) on a file in the folder, and ends with its process.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hierfl.core.disk import PRIVATE_FILE, private_folder, write_all, writing

fcntl: Any
try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None

LOCK_FILE = ".hierfl-lock"
# a file system that has no locks, as some network file systems do not
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_files: set[int] = set()  # open lock files of this process


class FolderInUse(RuntimeError):
    """Another process, or another call in this one, writes to the folder; the message names it."""


@contextmanager
def held(folder: str | Path) -> Iterator[None]:
    """Hold the lock on a run's folder, which is made if it does not exist.

    Where the system has no such locks, nothing is locked, and a warning says so.
    """
    root, owner = Path(folder), os.getpid()
    private_folder(root)
    file = _taken(root)
    try:
        yield
    finally:
        if file is not None and os.getpid() == owner:  # a copy of this process holds nothing
            _give_back(root, file)


def _taken(root: Path) -> int | None:
    """Take the lock and write down who holds it; None where there are no locks."""
    path = root / LOCK_FILE
    if fcntl is None:  # pragma: no cover - Windows
        _warn(root, "the system has no flock")
        return None
    while True:
        with writing(path, 0):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in NO_LOCKS:
                _warn(root, error.strerror)
                return None
            raise _in_use(root) from error
        if _is_at(file, path):
            break
        os.close(file)  # its holder removed it between our opening and locking it
    _files.add(file)
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
    try:
        os.ftruncate(file, 0)
        write_all(file, json.dumps(who).encode(), 0, path)
    except BaseException:
        _give_back(root, file)
        raise
    return file


def _give_back(root: Path, file: int) -> None:
    """Remove the lock file while it is still locked, and unlock it."""
    with suppress(FileNotFoundError):
        (root / LOCK_FILE).unlink()
    _files.discard(file)
    os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(root: Path) -> FolderInUse:
    """Return the error that names the holder of the lock, as far as it is known."""
    who: Any = None
    for _ in range(20):  # the holder may have the lock, and not have written its name yet
        with suppress(OSError, ValueError):
            who = json.loads((root / LOCK_FILE).read_text())
            break
        time.sleep(0.01)
    known = isinstance(who, dict) and {"pid", "host", "since"} <= set(who)
    holder = (
        f"process {who['pid']} on host {who['host']} has been writing to it since {who['since']}"
        if known
        else "another process is writing to it"
    )
    return FolderInUse(
        f"'{root}' is in use: {holder}; wait until it has ended, or name another folder"
    )


def _warn(root: Path, why: str | None) -> None:
    warnings.warn(
        f"'{root}' cannot be locked ({why}): let no other process write to it meanwhile",
        stacklevel=4,
    )


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")


def _close_copies() -> None:
    """Close the lock files in a fork, which would hold the lock after this process has ended."""
    while _files:
        with suppress(OSError):
            os.close(_files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
