"""Read data files, which need not be trusted: archives that ship, and files in HIERFL_DATA."""

import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from numpy.lib import format as npy
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
LARGEST = 4 << 30  # bytes of all arrays that are read from one archive
KINDS = "biufUS"  # numbers, booleans and words


def read_arrays(path: Path, names: Iterable[str] | None, layout: Mapping[str, str]) -> Arrays:
    """Return arrays of an archive (.npz), None: all, each of the shape in brackets in its `layout`, if any."""
    with reading(path), zipfile.ZipFile(path) as archive:
        arrays, budget = {}, LARGEST
        held = [entry.removesuffix(".npy") for entry in archive.namelist()]
        requested = held if names is None else list(names)
        absent = [name for name in requested if name not in held]
        if absent:
            raise ValueError(
                f"it has no array '{absent[0]}' ({layout.get(absent[0])}): its arrays are {held}"
            )
        for name in requested:
            budget -= _checked_size(archive, name, layout.get(name, ""))
            if budget < 0:
                raise ValueError(f"its arrays take more than {LARGEST} bytes")
            with archive.open(f"{name}.npy") as file:
                arrays[name] = npy.read_array(file, allow_pickle=False)
    return arrays


class NotTheFile(ValueError):
    """A data file that is damaged, or another one; the message names it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that a damaged or foreign file raises into one that names the file."""
    try:
        yield
    except (FileNotFoundError, ImportError, NotTheFile):
        raise
    except Exception as error:  # zlib's, zipfile's, NumPy's, and of what wrong arrays lead to
        raise NotTheFile(
            f"'{path}' is not the file it should be ({type(error).__name__}: {str(error)[:300]}): "
            "get it again"
        ) from error


def _checked_size(archive: zipfile.ZipFile, name: str, description: str) -> int:
    """Return the bytes of an array by its header; refuse another kind or shape than described."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.kind not in KINDS:
            raise ValueError(f"the array '{name}' is of type {dtype}: read with allow_pickle=False")
        size = math.prod(shape) * dtype.itemsize
        if file.tell() + size != info.file_size:
            raise ValueError(
                f"the array '{name}' has {info.file_size} bytes, not those of its shape {shape}"
            )
    shape_text = re.search(r"\(([^()]*)\)", description)
    if shape_text is not None:
        sizes = [word.strip() for word in shape_text[1].split(",") if word.strip()]
        if len(sizes) != len(shape) or any(
            word.isdigit() and int(word) != n for word, n in zip(sizes, shape, strict=True)
        ):
            raise ValueError(f"the array '{name}' has shape {shape}, not ({shape_text[1]})")
    return size


VARIABLE = "HIERFL_DATA"
T = TypeVar("T")


@dataclass(frozen=True)
class DataFile:
    """A data set read from `file` in HIERFL_DATA: where it is from, and what it must hold."""

    file: str
    origin: str
    arrays: Mapping[str, str]


def shipped(file: str) -> Arrays:
    """Return the arrays of an archive inside the package (`hierfl/datasets/shipped`)."""
    return read_arrays(Path(__file__).with_name("shipped") / file, None, {})


def located(source: DataFile) -> Path:
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


def load(source: DataFile, names: Iterable[str] | None = None) -> Arrays:
    """Read arrays from a source's archive; only those named (None: all listed) are decompressed."""
    return read_arrays(
        located(source), list(source.arrays if names is None else names), source.arrays
    )


def columns(source: DataFile) -> pd.DataFrame:
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


def read_from(source: DataFile) -> Callable[[Callable[[], T]], Callable[[], T]]:
    """Decorate a reader of a source: whatever wrong arrays make it raise names the file."""

    def decorate(reader: Callable[[], T]) -> Callable[[], T]:
        @wraps(reader)
        def read() -> T:
            with reading(located(source)):
                return reader()

        return read

    return decorate
