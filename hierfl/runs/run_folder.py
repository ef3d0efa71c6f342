"""The folder of a run: which entries are checkpoints, how one is put there, which are removed.

Only checkpoints of this run, down to their recorded files, and drafts are ever removed. The caller
holds the folder's lock.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

CHECKPOINT = re.compile(r"round-(\d{8})")
DRAFT = re.compile(r"\.draft-\d{8}-\d+")  # not complete: of a save that was interrupted
REPLACED = re.compile(
    r"\.replaced-(\d{8})"
)  # complete, and about to be replaced by another of its round
RECORD, GLOBAL, LOCAL = "state.json", "global.safetensors", "local.safetensors"
SCHEMA, ROWS = "fit.json", "local-rows.safetensors"  # of a saved fit
FILES = {RECORD, GLOBAL, LOCAL, SCHEMA, ROWS}
KEPT = 2  # checkpoints of a run, so that a damaged one has one before it

IsOfThisRun = Callable[[Path], bool]


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first."""
    found: dict[str, Path] = {}
    for pattern in (
        REPLACED,
        CHECKPOINT,
    ):  # one that was about to be replaced counts if nothing has replaced it
        for path in Path(folder).glob("*"):
            name = pattern.fullmatch(path.name)
            if name and any((path / file).is_file() for file in FILES):
                found[name[1]] = path
    return [path for _, path in sorted(found.items())]


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
            warnings.warn(
                f"'{path}' was not written by this run as it stands, and is now '{other.name}': "
                "remove it if nobody needs it",
                stacklevel=2,
            )
            return


def sync(folder: Path) -> None:
    """Write a folder's entries to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
