"""Reading data files: archives shipped with the package, and archives in the folder named by HIERFL_DATA."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARIABLE = "HIERFL_DATA"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Source:
    """A data set that is not shipped, but read from a file.

    Args:
        file: path of the archive (.npz), relative to the folder named by HIERFL_DATA.
        origin: public name, authors and licence of the data set, to find it by.
        arrays: name -> description of the array that the archive must hold under that name.
    """

    file: str
    origin: str
    arrays: Mapping[str, str]


def shipped(file: str) -> Arrays:
    """Return the arrays of an archive inside the package (`hierfl/datasets/shipped`)."""
    with np.load(Path(__file__).with_name("shipped") / file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def located(source: Source) -> Path:
    """Return the path of a source's archive.

    Raises:
        FileNotFoundError: HIERFL_DATA is not set, or its folder lacks the file. The message says how to get
            the set.
    """
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
    raise FileNotFoundError(
        f"{why}: get {source.origin}, save it as '{source.file}' (a NumPy archive with {layout}), "
        f"and set the environment variable {VARIABLE} to its folder"
    )


def load(source: Source, names: Iterable[str] | None = None) -> Arrays:
    """Read arrays from a source's archive; only those named are decompressed.

    Args:
        source: the data set.
        names: names of the arrays to read; all that the source lists if None.

    Raises:
        FileNotFoundError: as `located`.
        ValueError: the archive lacks an array.
    """
    path = located(source)
    with np.load(path, allow_pickle=False) as archive:
        wanted = list(source.arrays if names is None else names)
        absent = [name for name in wanted if name not in archive.files]
        if absent:
            raise ValueError(
                f"'{path}' has no array '{absent[0]}' ({source.arrays[absent[0]]}): "
                f"its arrays are {archive.files}"
            )
        return {name: archive[name] for name in wanted}
