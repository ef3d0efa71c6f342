"""Studies: what the papers measured, measured again, one module each: `hierfl study NAME`, or `studies.run(NAME, out)`.

A study may have several parts, each a module with a documented

    run(out: Path, *, quick: bool = False, say: Callable[[str], None] = ...) -> Found

which writes figures and a table of every number to `out`, and keeps each finished run's numbers there (`hierfl.studies.results`), so
that it goes on where it was stopped. To add one, write the module and name it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from hierfl.studies.results import Found, Say, quiet

STUDIES: dict[str, tuple[str, ...]] = {
    "fedmap-synthetic": ("fedmap_synthetic",),
    "new-clients": ("new_clients_fashion", "writers"),
    "ood-entropy": ("ood_entropy",),
    "prior-ablation": ("prior_ablation",),
    "toy-linear-regression": ("toy_fedabml", "toy_fedmap"),
}

__all__ = ["STUDIES", "Found", "names", "run"]


def names() -> tuple[str, ...]:
    """The studies there are."""
    return tuple(sorted(STUDIES))


def run(name: str, out: str | Path, *, quick: bool = False, say: Say = quiet) -> Iterator[Found]:
    """What each part of a study finds, one after another.

    Args:
        name: of the study.
        out: folder to write to, made if it is not there. Runs that it holds already are not run again.
        quick: hardly any work, about half a minute: to see that it runs. The numbers then mean nothing.
        say: told what is being done.

    Raises:
        KeyError: there is no such study; the message lists them.
        FileNotFoundError: the study needs a data set that is not there; the message says how to get it.
        OSError: the folder cannot be written to.
    """
    if name not in STUDIES:
        raise KeyError(f"there is no study '{name}'; there are {', '.join(names())}")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for part in STUDIES[name]:
        yield import_module(f"hierfl.studies.{part}").run(folder, quick=quick, say=say)
