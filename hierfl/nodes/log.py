"""A node's log: a line of JSON for everything that leaves the node, written before it leaves.

{"time": "2026-01-01T12:00:00+00:00", "run": "1f0c...", "round": 3, "what": "update",
 "bytes": 1234, "sha256": "ab12...", "tensors": {"['theta'][0]": ["float64", 27]}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hierfl.core.disk import PRIVATE_FILE, writing
from hierfl.core.trees import Tree, named_leaves

FILE = "left.jsonl"
LONGEST = 500  # characters of an error in the log
UPDATE = "update"


def left(
    folder: Path,
    content: bytes,
    what: str,
    *,
    run: str | None = None,
    round_: int | None = None,
    tree: Tree | None = None,
) -> bytes:
    """Log something that is about to leave the node, and return it.

    Args:
        folder: the node's.
        content: what leaves.
        what: "introduction", "start", "update", "refusal", or a kind of answer.
        run: name of the run; None: before there is one.
        round_: number of the round; None: it is not of a round.
        tree: the tensors in it; None: it is text, and logged whole.

    Raises:
        CannotWrite: the log cannot be written; then nothing may leave.
    """
    said: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    said |= {"run": run, "round": round_, "what": what, "bytes": len(content)}
    said["sha256"] = hashlib.sha256(content).hexdigest()
    if tree is None:
        said["text"] = content.decode(errors="replace")[:LONGEST]
    else:
        said["tensors"] = {
            name: [str(v.dtype).removeprefix("torch."), *v.shape]
            for name, v in named_leaves(tree).items()
        }
    _append(folder / FILE, (json.dumps(said) + "\n").encode())
    return content


@contextmanager
def refusals(folder: Path, run: str | None = None) -> Iterator[None]:
    """Log why something is refused, which a transport sends to the server."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        left(folder, str(error).encode(), "refusal", run=run)
        raise


def _append(path: Path, line: bytes) -> None:
    with writing(path, len(line)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # by a crash
            os.write(handle, (b"\n" if torn else b"") + line)
            os.fsync(handle)
        finally:
            os.close(handle)


def entries(folder: Path) -> list[dict[str, Any]]:
    """Return what has left a node, in order, without lines that a crash cut off."""
    try:
        lines = (folder / FILE).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)]


def rounds_today(folder: Path, now: datetime | None = None) -> set[tuple[str, int]]:
    """Return the rounds, with their runs, whose updates left a node in the last 24 hours."""
    since = (now or datetime.now(UTC)) - timedelta(days=1)
    return {
        (str(one["run"]), int(one["round"]))
        for one in entries(folder)
        if one.get("what") == UPDATE and datetime.fromisoformat(one["time"]) > since
    }
