"""A node's log: a line of JSON for everything that leaves the node, written before it leaves.

{"time": "2026-01-01T12:00:00.000000+00:00", "run": "1f0c...", "round": 3, "what": "update",
 "bytes": 1234, "sha256": "ab12...", "tensors": {"['theta'][0]": ["float64", 27]}, "rows": 120,
 "method": "two_stage", "policy": {"min_rows": 20}, "by": "who asked, as the transport says"}

Refusals, and answers given again, have a file of their own, of which the last 8 MB are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from hierfl.core.disk import CannotWrite, private_folder, replace_private, write_line, writing
from hierfl.core.trees import Tree, named_leaves
from hierfl.data.consistency import RowsFault
from hierfl.nodes.messages import NodeFailed, Refused
from hierfl.runs.run_folder import FolderInUse, held, sync

ASKED_BY: ContextVar[str | None] = ContextVar("asked_by", default=None)
FILE, REFUSED, OLDER = "left.jsonl", "refused.jsonl", "refused.older.jsonl"
MARK, COPY = MARKS = "has-account", "has-answered"  # what a `Mark` has
LENGTH = 200  # bytes of that file
MOST = 4 << 20  # bytes of the file of refusals before it becomes the older one
LONGEST = 2000  # characters of a detail
# seconds that a message waits for the one before it, and between two looks
WAIT, PAUSE = 600.0, 0.02
# all that leaves of an error in the rows or at the node
FAILS = "the node cannot answer: its own log says why"
UNWRITTEN = "the node's folder cannot be written: its owner frees space there or makes it writable"


def left(
    folder: Path,
    content: bytes,
    what: str,
    *,
    run: str | None = None,
    round_: int | None = None,
    tree: Tree | None = None,
    **more: Any,
) -> bytes:
    """Log what is about to leave the node, and return it; if the log cannot be written, nothing leaves."""
    line: dict[str, Any] = {"time": now(), "run": run, "round": round_, "what": what}
    line |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if tree is None:
        line["text"] = content.decode(errors="replace")
    else:
        line["tensors"] = {
            name: [str(v.dtype).removeprefix("torch."), *v.shape]
            for name, v in named_leaves(tree).items()
        }
    path = folder / FILE
    if what == "refusal" or what.startswith("again: "):
        path = folder / REFUSED
        if path.exists() and path.stat().st_size > MOST:
            path.replace(folder / OLDER)
    mark = mark_of(folder) if path.name == FILE else None
    line |= {} if mark is None else {"account": mark.head}
    more["by"] = ASKED_BY.get()
    line |= {name: value for name, value in more.items() if value is not None}
    written = json.dumps(line).encode()
    write_line(path, written)
    if mark is not None:
        start, last = path.stat().st_size - len(written) - 1, hashlib.sha256(written).hexdigest()
        set_mark(folder, mark._replace(start=start, last=last))
    return content


@contextmanager
def answering(folder: Path, run: str | None = None, *, of_owner: bool = False) -> Iterator[None]:
    """Answer one message, alone in the node's folder; errors leave without values of rows, except to the owner."""
    private_folder(folder)
    with ExitStack() as stack:
        until = monotonic() + WAIT
        while True:
            try:
                stack.enter_context(held(folder))
                break
            except FolderInUse as error:
                if monotonic() > until:
                    raise Refused("the node is busy with another message: ask again") from error
                sleep(PAUSE)
        try:
            yield
        except (Refused, NodeFailed) as error:
            if not error.logged:
                refused(folder, run, str(error), error.__cause__)
            error.logged = True
            raise
        except Exception as error:
            failed = NodeFailed(text := may_tell(error))
            with suppress(CannotWrite):
                refused(folder, run, text, error)
                failed.logged = True
            if of_owner:
                raise
            raise failed from error


def may_tell(error: BaseException) -> str:
    """Return what may leave of an error in the rows or at the node: of a fault of the rows, the column and the kind."""
    if isinstance(error, CannotWrite):
        return UNWRITTEN
    public = error.public if isinstance(error, RowsFault) else ""
    return f"{public}: the node's own log says where" if public else FAILS


def refused(folder: Path, run: str | None, text: str, cause: BaseException | None) -> None:
    """Log a text that leaves in place of an answer, and for the owner what caused it."""
    why = None if cause is None else f"{type(cause).__name__}: {cause}"[:LONGEST]
    left(folder, text.encode(), "refusal", run=run, detail=why)


def now(since: timedelta = timedelta(0)) -> str:
    """Return the time in UTC, or one that long ago, as text; later times are greater texts."""
    return (datetime.now(UTC) - since).isoformat(timespec="microseconds")


class Mark(NamedTuple):
    """How many lines a folder's ledger has, the last one's hash, and where the log's last line starts, and its hash."""

    entries: int
    head: str
    start: int = 0
    last: str = ""


def mark_of(folder: Path, name: str = MARK) -> Mark | None:
    """Return the mark of a folder's ledger; None: it has none that can be read."""
    try:
        mark = Mark(*json.loads((folder / name).read_bytes()))
        return mark if min(mark.entries - 1, mark.start) >= 0 else None
    except (OSError, TypeError, ValueError, RecursionError):
        return None


def set_mark(folder: Path, mark: Mark) -> None:
    """Write the marks of a folder's ledger, in their place: after a power cut they may be earlier ones."""
    content = json.dumps(mark).encode().ljust(LENGTH)
    for path in (folder / name for name in MARKS):
        if not path.exists():
            replace_private(path, content)
            sync(folder)
        with writing(path, LENGTH), open(path, "r+b", buffering=0) as file:
            file.write(content)


def accounts_since(folder: Path, mark: Mark) -> list[str] | None:
    """Return the hashes of the ledger that lines of the log name from the marked one on; None: that one is gone."""
    lines, named = [b""], list[str]()
    with suppress(OSError), open(folder / FILE, "rb") as file:
        file.seek(mark.start)
        lines = file.read().split(b"\n")
    if mark.last and hashlib.sha256(lines[0]).hexdigest() != mark.last:
        return None
    for line in lines[:-1]:
        # a line of before an account, or cut by a crash
        with suppress(KeyError, TypeError, ValueError, RecursionError):
            named.append(json.loads(line)["account"])
    return named
