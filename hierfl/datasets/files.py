"""Read data files: archives that ship, and archives and tables in the folder HIERFL_DATA."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TypeVar

import pandas as pd

from hierfl.datasets.archives import Arrays, read_arrays, reading

__all__ = ["Arrays", "Source", "columns", "load", "located", "read_from", "shipped"]

VARIABLE = "HIERFL_DATA"
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A data set read from `file` in HIERFL_DATA: where it is from, and what it must hold."""

    file: str
    origin: str
    arrays: Mapping[str, str]


def shipped(file: str) -> Arrays:
    """Return the arrays of an archive inside the package (`hierfl/datasets/shipped`)."""
    path = Path(__file__).with_name("shipped") / file
    with reading(path), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    return read_arrays(path, names, {})


def located(source: Source) -> Path:
    """Return the path of a source's file; the error says how to get the set."""
    folder = os.environ.get(VARIABLE)
    path = Path(folder or ".") / source.file
    if folder and path.is_file():
        return path
    why = (
        f"'{source.file}' is not in the folder named by {VARIABLE}, '{folder}'"
        if folder
        else f"{VARIABLE} is not set"
    )
    layout = "; ".join(f"{name}: {what}" for name, what in source.arrays.items())
    kind = "CSV file" if source.file.endswith(".csv") else "NumPy archive"
    raise FileNotFoundError(
        f"{why}: get {source.origin}, save it as '{source.file}' (a {kind} with {layout}), "
        f"and set the environment variable {VARIABLE} to its folder"
    )


def load(source: Source, names: Iterable[str] | None = None) -> Arrays:
    """Read arrays from a source's archive; only those named (None: all listed) are decompressed."""
    return read_arrays(
        located(source), list(source.arrays if names is None else names), source.arrays
    )


def columns(source: Source) -> pd.DataFrame:
    """Read the columns that a source lists from its table; NaN where a value is missing."""
    path = located(source)
    with reading(path):
        frame = pd.read_csv(path)
        if absent := [name for name in source.arrays if name not in frame]:
            raise ValueError(
                f"it has no column '{absent[0]}' ({source.arrays[absent[0]]}): its columns are "
                f"{list(frame)}"
            )
        return frame[list(source.arrays)].astype("float64")


def read_from(source: Source) -> Callable[[Callable[[], T]], Callable[[], T]]:
    """Decorate a reader of a source: whatever wrong arrays make it raise names the file."""

    def decorate(reader: Callable[[], T]) -> Callable[[], T]:
        @wraps(reader)
        def read() -> T:
            with reading(located(source)):
                return reader()

        return read

    return decorate
