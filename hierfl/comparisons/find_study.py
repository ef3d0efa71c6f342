"""Study files by name: those that ship with hierfl, and files of one's own by their path."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from hierfl.comparisons.read_study import listing, read
from hierfl.comparisons.study_data import SHIPPED, nearest

FOLDER = Path(str(files("hierfl.studies"))) / "shipped"


class Listed(NamedTuple):
    """A line of `hierfl compare --list`; `quick` and `full` say how long each form takes."""

    name: str
    shows: str
    data: str
    variants: str
    quick: str
    full: str


def names() -> list[str]:
    """Return the names of the studies that ship, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(study: str) -> Path:
    """Return the file of a study: one that ships, by its name, or one's own, by its path."""
    if study in names():
        return FOLDER / f"{study}.toml"
    path = Path(study)
    if path.is_file():
        return path
    plain = path.name.removesuffix(".toml")
    raise FileNotFoundError(
        f"there is no study '{study}'{nearest(plain, names())}: give the path of a file, or a name "
        f"of {', '.join(names())}"
    )


def listed() -> Iterator[Listed]:
    """Yield a line for each study that ships."""
    for name in names():
        file = FOLDER / f"{name}.toml"
        about, studies = listing(file), read(file)
        sets = dict.fromkeys(
            source if source in SHIPPED else f"{source} (HIERFL_DATA)"
            for study in studies.values()
            for source in (study.data.name, *study.evaluation.foreign)
            if source not in ("unseen_classes", "shuffled_pixels")
        )
        variants = ", ".join(name for name in studies if name)
        yield Listed(name, about.shows, ", ".join(sets), variants, about.quick, about.full)
