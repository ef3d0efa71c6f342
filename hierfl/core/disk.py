"""Writing files: private ones, and errors that name file, size and fix."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


class CannotWrite(OSError):
    """A file cannot be written: the message names the file, its size, the reason and the fix."""


@contextmanager
def writing(path: Path, size: int, *, foreign: type[Exception] = OSError) -> Iterator[None]:
    """Raise `CannotWrite`, which names file, size and fix, in place of an error of the system."""
    try:
        yield
    except CannotWrite:
        raise
    except (OSError, foreign) as error:
        number = error.errno if isinstance(error, OSError) else _number_in(str(error))
        why = os.strerror(number) if number else str(error)
        raised = CannotWrite(
            f"'{path}' cannot be written ({f'{size:,} bytes: ' if size else ''}{why}; "
            f"{_free(path)}): free some space there or make it writable, or name another place"
        )
        raised.errno = number
        raise raised from error


def _number_in(text: str) -> int | None:
    """Return the system's error number in a message of safetensors, "... (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None


def _free(path: Path) -> str:
    """Say how much space is left where a file is to be."""
    for place in path.parents:
        with suppress(OSError):
            return f"{shutil.disk_usage(place).free:,} bytes are free"
    return "the free space is unknown"


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can read, unless it exists."""
    with writing(path, 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, and wait until it is on disk."""
    with writing(path, len(content)), open(path, "wb", opener=_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def write_all(file: int, content: bytes, at: int, path: Path) -> None:
    """Write all bytes at a place of an open file; the system may write a part without an error."""
    rest = memoryview(content)
    with writing(path, len(content)):
        while rest:
            done = os.pwrite(file, rest, at)
            at, rest = at + done, rest[done:]
