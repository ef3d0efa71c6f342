"""Read untrusted NumPy archives: sizes are checked before allocation, nothing is unpickled."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
LARGEST = 4 << 30  # bytes of all arrays that are read from one archive
KINDS = "biufUS"  # numbers, booleans and words


def read_arrays(path: Path, names: Iterable[str], layout: Mapping[str, str]) -> Arrays:
    """Return arrays of an archive (.npz), each of the shape in brackets in its `layout`, if any."""
    with reading(path), zipfile.ZipFile(path) as archive:
        found, left = {}, LARGEST
        wanted, held = list(names), [entry.removesuffix(".npy") for entry in archive.namelist()]
        absent = [name for name in wanted if name not in held]
        if absent:
            raise ValueError(
                f"it has no array '{absent[0]}' ({layout.get(absent[0])}): its arrays are {held}"
            )
        for name in wanted:
            left -= _checked_size(archive, name, layout.get(name, ""))
            if left < 0:
                raise ValueError(f"its arrays take more than {LARGEST} bytes")
            with archive.open(f"{name}.npy") as file:
                found[name] = npy.read_array(file, allow_pickle=False)
    return found


class NotTheFile(ValueError):
    """A data file that is damaged, or another one; the message names it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that a damaged or foreign file raises into one that names the file."""
    try:
        yield
    except (FileNotFoundError, ImportError, NotTheFile):
        raise
    except (
        Exception
    ) as error:  # zlib's, zipfile's, NumPy's, and those of what is computed from wrong arrays
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
    wanted = re.search(r"\(([^()]*)\)", description)
    if wanted is not None:
        sizes = [word.strip() for word in wanted[1].split(",") if word.strip()]
        if len(sizes) != len(shape) or any(
            word.isdigit() and int(word) != n for word, n in zip(sizes, shape, strict=True)
        ):
            raise ValueError(f"the array '{name}' has shape {shape}, not ({wanted[1]})")
    return size
