"""The folder of a run: its `flock`, its checkpoints, how one is put there, which are removed."""

import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hierfl.core.disk import PRIVATE_FILE, private_folder, write_all, writing
from hierfl.core.user_warnings import warn

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
    """Hold the lock on a run's folder, made if absent; warn where the system has no such locks."""
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
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    try:
        os.ftruncate(file, 0)
        write_all(file, json.dumps(who).encode(), 0, path)
    except BaseException:
        _give_back(root, file)
        raise
    return file


def _give_back(root: Path, file: int) -> None:
    with suppress(FileNotFoundError):
        (root / LOCK_FILE).unlink()
    _files.discard(file)
    os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _in_use(root: Path) -> FolderInUse:
    who: Any = None
    for _ in range(20):  # the holder may have the lock, and not have written its name yet
        with suppress(OSError, ValueError):
            who = json.loads((root / LOCK_FILE).read_text())
            break
        time.sleep(0.01)
    holder = "another process is writing to it"
    if isinstance(who, dict) and {"pid", "host", "since"} <= set(who):
        holder = f"process {who['pid']} on host {who['host']} has been writing to it since {who['since']}"
    fix = "wait until it has ended, or name another folder"
    return FolderInUse(f"'{root}' is in use: {holder}; {fix}")


def _warn(root: Path, why: str | None) -> None:
    what = f"'{root}' cannot be locked ({why})"
    warn(f"{what}: let no other process write to it meanwhile")


def _close_copies() -> None:
    """Close the lock files in a fork, which would hold the lock after this process has ended."""
    while _files:
        with suppress(OSError):
            os.close(_files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


CHECKPOINT = re.compile(r"round-(\d{8})")
DRAFT = re.compile(r"\.draft-\d{8}-\d+")  # not complete: of a save that was interrupted
REPLACED = re.compile(r"\.replaced-(\d{8})")  # complete: another of its round is about to come
RECORD, GLOBAL, LOCAL = "state.json", "global.safetensors", "local.safetensors"
SCHEMA, ROWS = "fit.json", "local-rows.safetensors"  # of a saved fit
NODES = "nodes.json"  # of a saved fit over nodes
FILES = {RECORD, GLOBAL, LOCAL, SCHEMA, ROWS, NODES}
KEPT = 2  # checkpoints of a run, so that a damaged one has one before it

IsOfThisRun = Callable[[Path], bool]


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first."""
    paths: dict[str, Path] = {}
    for pattern in (REPLACED, CHECKPOINT):  # the first counts if nothing has replaced it
        for path in Path(folder).glob("*"):
            name = pattern.fullmatch(path.name)
            if name and any((path / file).is_file() for file in FILES):
                paths[name[1]] = path
    return [path for _, path in sorted(paths.items())]


def round_of(path: Path) -> int:
    """Return how many rounds the run of a checkpoint had done, by the name of its folder."""
    return int(path.name[-8:])


def draft_of(root: Path, round: int) -> Path:
    """Make a folder for the files of a checkpoint, into which no reader looks."""
    draft = root / f".draft-{round:08d}-{os.getpid()}"
    draft.mkdir(mode=0o700)
    return draft


def clear(root: Path) -> None:
    """Remove drafts of dead processes, and restore a checkpoint that was being replaced."""
    for path in list(root.glob(".*")):
        replaced = REPLACED.fullmatch(path.name)
        final = root / f"round-{replaced[1]}" if replaced else None
        if final is not None and not final.exists():
            os.rename(path, final)
        elif replaced or DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def put(root: Path, draft: Path, round: int, is_ours: IsOfThisRun) -> Path:
    """Turn a complete draft into its round's checkpoint; at every moment one is whole."""
    final, replaced = root / f"round-{round:08d}", root / f".replaced-{round:08d}"
    if final.exists() and not (is_ours(final) and holds_no_more(final)):
        _set_aside(final)
    if final.exists():
        os.rename(final, replaced)
    os.rename(draft, final)
    sync(root)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def prune(root: Path, newest: Path, is_ours: IsOfThisRun) -> None:
    """Remove all but the last checkpoints of this run, up to the newest."""
    ours = [path for path in checkpoints(root) if path.name <= newest.name and is_ours(path)]
    _remove(root, ours[:-KEPT])


def discard(root: Path, is_ours: IsOfThisRun) -> None:
    """Remove all checkpoints of a run: it begins again, with more rounds."""
    _remove(root, [path for path in checkpoints(root) if is_ours(path)])


def _remove(root: Path, paths: list[Path]) -> None:
    for old in paths:
        if holds_no_more(old):
            gone = root / f".draft-{round_of(old):08d}-{os.getpid()}"
            os.rename(old, gone)  # at once: half a checkpoint would be taken for a damaged one
            shutil.rmtree(gone, ignore_errors=True)


def holds_no_more(path: Path) -> bool:
    """Return whether a folder holds nothing but what hierfl has put there."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= FILES


def _set_aside(path: Path) -> None:
    """Rename what stands in a checkpoint's place: not of this run, damaged, or with other files."""
    for k in range(1, 10_000):
        other = path.with_name(f"{path.name}.aside-{k}")
        if not other.exists():
            os.rename(path, other)
            what = f"'{path}' is not as this run wrote it, and was renamed to '{other.name}'"
            warn(f"{what}: remove it if nobody needs it")
            return


def sync(folder: Path) -> None:
    """Write a folder's entries to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
