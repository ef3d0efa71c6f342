"""The owner's approval of what leaves a node, of a text in the node's folder."""

from __future__ import annotations

from pathlib import Path

from hierfl.core.disk import private_folder, write_private
from hierfl.nodes.account import digest
from hierfl.nodes.policy import Forbidden

PREVIEWS, APPROVED = "previews", "approved"
LONGEST = 1 << 18  # characters of a preview
MOST = 100  # previews that are kept; the oldest that were not approved go first


def preview_of(folder: Path, run: str) -> Path:
    """Return the file of a run's preview."""
    return folder / PREVIEWS / f"{run}.txt"


def write_preview(folder: Path, run: str, text: str) -> None:
    """Write the preview of a run into a node's folder, for a terminal; refuse one that nobody reads (`Forbidden`)."""
    if len(text) > LONGEST:
        raise Forbidden(f"what its owner would have to read has more than {LONGEST:,} characters")
    private_folder(folder / PREVIEWS)
    shown = "".join(of if of.isprintable() or of == "\n" else " " for of in text)
    write_private(preview_of(folder, run), f"{shown}\n".encode())
    texts = sorted((folder / PREVIEWS).glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
    waiting = [path for path in texts if not (folder / APPROVED / path.stem).exists()]
    for path in waiting[:-MOST]:
        path.unlink()


def approve(folder: Path, run: str) -> Path:
    """Approve a run, whose preview the owner has read; return the file of the preview."""
    path = preview_of(folder, run)
    if "/" in run or not path.exists():
        runs = ", ".join(sorted(text.stem for text in path.parent.glob("*.txt")))
        waiting = f"it has those of {runs}" if runs else "no run has asked for approval yet"
        raise FileNotFoundError(f"'{folder}' has no preview of run '{run}': {waiting}")
    private_folder(folder / APPROVED)
    write_private(folder / APPROVED / run, digest(path.read_bytes()).encode())
    return path


def check_approved(folder: Path, run: str) -> None:
    """Refuse what the owner has not approved as its preview stands (`Forbidden`)."""
    path, approved = preview_of(folder, run), folder / APPROVED / run
    if path.exists() and approved.exists() and approved.read_text() == digest(path.read_bytes()):
        return
    raise Forbidden(
        f"run '{run}' waits for the approval of the node's owner, who reads "
        f"{PREVIEWS}/{run}.txt in the node's folder, and then runs hierfl node approve FOLDER {run}"
    )


def asked_first(folder: Path, what: str, text: str) -> None:
    """Refuse what leaves before a run, unless the owner has approved its text (`Forbidden`)."""
    name = f"{what}-{digest(text.encode())[:16]}"
    write_preview(folder, name, text)
    check_approved(folder, name)
