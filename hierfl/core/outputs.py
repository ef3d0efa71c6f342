"""Files for users, such as reports and tables; only hierfl's own files are overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hierfl.core.disk import writing

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
