"""Studies that repeat a paper's measurements: `hierfl study NAME`, or `studies.run(NAME, out)`.

A study has one or more parts. Each part is a module with a documented

    run(out: Path, *, quick: bool = False, say: Callable[[str], None] = ...) -> Found

which writes figures and a table of every number to `out`. It also saves the numbers of each finished run
there (see `hierfl.studies.results`), so that an interrupted study resumes where it stopped. To add a study,
write the module and list it in `STUDIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from hierfl.core.outputs import claim
from hierfl.studies.results import Found, Say, quiet

STUDIES: dict[str, tuple[str, ...]] = {
    "baselines": ("baselines",),
}

# what each part writes to the study's folder, beside `runs/`
FILES: dict[str, tuple[str, ...]] = {
    "baselines": ("baselines.csv",),
}

__all__ = ["STUDIES", "Found", "names", "run"]


def names() -> tuple[str, ...]:
    """Return the names of all studies, sorted."""
    return tuple(sorted(STUDIES))


def claim_files(name: str, folder: Path) -> None:
    """Make a study's folder, and refuse to overwrite files in it that no study has written there.

    Raises:
        OSError: the folder cannot be made or written to, or holds such files (`FileExistsError`).
    """
    claim(folder, [file for part in STUDIES[name] for file in FILES.get(part, ())])


def run(name: str, out: str | Path, *, quick: bool = False, say: Say = quiet) -> Iterator[Found]:
    """Run a study and yield the result of each part as it finishes.

    Args:
        name: name of the study, one of `names()`.
        out: folder to write to; created if missing. Runs that are already saved there are not repeated.
        quick: do very little work (about half a minute), to check that the study runs. The numbers are then
            meaningless. Of "baselines" this is a small study of its own, which takes a few minutes.
        say: called with one line of text for each step of progress.

    Yields:
        The result of one part.

    Raises:
        KeyError: `name` is not the name of a study; the message lists the names.
        FileNotFoundError: a data set that the study needs is missing; the message says how to get it.
        OSError: `out` cannot be created or written to, or holds files of the study's names that no study has
            written there (`FileExistsError`).
    """
    if name not in STUDIES:
        raise KeyError(f"there is no study '{name}'; choose one of {', '.join(names())}")
    folder = Path(out)
    claim_files(name, folder)
    for part in STUDIES[name]:
        yield import_module(f"hierfl.studies.{part}").run(folder, quick=quick, say=say)
