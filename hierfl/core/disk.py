"""Writing files: private ones, those for users, and errors that name file, size and fix."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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
        code = re.search(r"\(os error (\d+)\)", str(error))  # in a message of safetensors
        number = error.errno if isinstance(error, OSError) else int(code[1]) if code else None
        why = os.strerror(number) if number else str(error)
        raised = CannotWrite(
            f"'{path}' cannot be written ({f'{size:,} bytes: ' if size else ''}{why}; "
            f"{_free(path)}): free some space there or make it writable, or name another place"
        )
        raised.errno = number
        raise raised from error


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
    private = partial(os.open, mode=PRIVATE_FILE)
    with writing(path, len(content)), open(path, "wb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(f"{path.name}.draft")
    write_private(draft, content)
    draft.replace(path)


def write_all(file: int, content: bytes, at: int, path: Path) -> None:
    """Write all bytes at a place of an open file; the system may write a part without an error."""
    view = memoryview(content)
    with writing(path, len(content)):
        while view:
            done = os.pwrite(file, view, at)
            at, view = at + done, view[done:]


def write_line(path: Path, line: bytes, at: int | None = None) -> None:
    """Write a line behind the first `at` bytes of a file, or its end and what a crash cut, and wait for the disk."""
    with writing(path, len(line)):
        mode = os.O_RDWR | os.O_CREAT | (os.O_APPEND if at is None else 0)
        file = os.open(path, mode, PRIVATE_FILE)
        try:
            size = os.fstat(file).st_size if at is None else at
            if at is not None:
                os.ftruncate(file, at)
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            write_all(file, b"\n" * torn + line + b"\n", size, path)
            os.fsync(file)
        finally:
            os.close(file)


WRITTEN = ".hierfl-files.json"  # the names of the files that hierfl has written to a folder


def claim(folder: Path, names: Collection[str]) -> None:
    """Make a folder, note the files to be written, and refuse to overwrite files of others."""
    folder.mkdir(parents=True, exist_ok=True)
    ours: set[str] = set()
    with suppress(OSError, ValueError, TypeError):
        ours = set(json.loads((folder / WRITTEN).read_text()))
    foreign = sorted(name for name in names if name not in ours and (folder / name).exists())
    if foreign:
        raise FileExistsError(
            f"'{folder / foreign[0]}' is there already, and hierfl did not write it: name another "
            "folder, or move that file"
        )
    replace_text(folder / WRITTEN, json.dumps(sorted({*ours, *names})))


def replace_text(path: Path, text: str) -> None:
    """Write a text file as `replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: the old one is replaced once the new content is on disk."""
    path = Path(os.path.realpath(path))  # through a link, not over it
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path, len(content)):
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
