"""The owner's approval of a run: of its preview, as it stands in the node's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hierfl.core.disk import private_folder, write_private
from hierfl.nodes.policy import Forbidden

PREVIEWS, APPROVED = "previews", "approved"


def preview_of(folder: Path, run: str) -> Path:
    """Return the file of a run's preview."""
    return folder / PREVIEWS / f"{run}.txt"


def write_preview(folder: Path, run: str, files: dict[str, str]) -> None:
    """Write the preview of a run into a node's folder, a file per ending."""
    private_folder(folder / PREVIEWS)
    for ending, text in files.items():
        write_private(folder / PREVIEWS / f"{run}.{ending}", text.encode())


def approve(folder: Path, run: str) -> Path:
    """Approve a run, whose preview the owner has read; return the file of the preview.

    Raises:
        FileNotFoundError: the node has no preview of such a run.
    """
    path = preview_of(folder, run)
    if "/" in run or not path.exists():
        known = ", ".join(sorted(one.stem for one in path.parent.glob("*.txt"))) or "none"
        raise FileNotFoundError(
            f"'{folder}' has no preview of run '{run}': it has those of {known}"
        )
    private_folder(folder / APPROVED)
    write_private(folder / APPROVED / run, _hash(path).encode())
    return path


def check_approved(folder: Path, run: str) -> None:
    """Refuse a run that the owner has not approved as its preview stands (`Forbidden`)."""
    path, given = preview_of(folder, run), folder / APPROVED / run
    if path.exists() and given.exists() and given.read_text() == _hash(path):
        return
    raise Forbidden(
        f"run '{run}' waits for the approval of the node's owner: read '{path}', then run "
        f"hierfl node approve '{folder}' {run}"
    )


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
