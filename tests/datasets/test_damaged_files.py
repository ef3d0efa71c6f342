"""A damaged, forged or wrong data file gives one error that names it, before allocation."""

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from benchmarks.attacks.mutations import flipped
from hierfl import datasets
from hierfl.comparisons.cells import keep, kept
from hierfl.datasets import files

Arrays = dict[str, Any]


def rats() -> Arrays:
    days = np.tile(np.array([8.0, 15.0, 22.0, 29.0, 36.0]), 30)
    return {"rat": np.repeat(np.arange(1, 31), 5), "x": days, "y": 6.0 * days}


def header(shape: tuple[int, ...], dtype: str = "<f8", after: bytes = b"") -> bytes:
    """Return the bytes of an array that promises a shape, and holds something else."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + after


def written(path: Path, arrays: Arrays) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in arrays.items():
            content = value
            if not isinstance(value, bytes):
                file = io.BytesIO()
                npy.write_array(file, np.asarray(value), allow_pickle=True)
                content = file.getvalue()
            archive.writestr(f"{name}.npy", content)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIERFL_DATA", str(tmp_path))
    return tmp_path / "rats_data.npz"


FORGED: dict[str, Callable[[Arrays], Arrays]] = {
    "objects": lambda a: {**a, "y": np.array([{}] * 150, dtype=object)},
    "a shape of terabytes": lambda a: {**a, "y": header((10**12,))},
    "a shape that overflows": lambda a: {**a, "y": header((1 << 62, 1 << 62))},
    "a negative shape": lambda a: {**a, "y": header((-1,), after=bytes(1200))},
    "records": lambda a: {**a, "y": np.zeros(150, dtype=[("a", "f8")])},
    "words": lambda a: {**a, "y": np.array(["a"] * 150)},
    "numbers for words": lambda a: {**a, "rat": np.array(["a"] * 150)},
    "another length": lambda a: {**a, "y": np.zeros(149)},
    "another dimension": lambda a: {**a, "y": np.zeros((150, 1))},
    "rats of no number": lambda a: {**a, "rat": np.full(150, 99)},
    "no array": lambda a: {**a, "y": b""},
    "a pickle": lambda a: {**a, "y": b"\x80\x04K\x01."},
    "one array too few": lambda a: {"rat": a["rat"], "x": a["x"]},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_file_is_refused_by_name(what: str, path: Path) -> None:
    written(path, FORGED[what](rats()))
    with pytest.raises(ValueError, match=r"rats_data.npz' is not the file it should be .*: get"):
        datasets.rats()


def test_a_huge_archive_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    content = written(path, {**rats(), "y": np.zeros(1 << 20)})
    assert len(content) < 100_000, "a megabyte a kilobyte"
    with pytest.raises(ValueError, match=r"take more than|has shape"):
        datasets.rats()
    with pytest.raises(ValueError, match="its arrays take more than 1048576 bytes"):
        files.read_arrays(path, ["y"], {})


def test_flipped_bytes_are_refused_or_change_nothing(path: Path) -> None:
    how, content = random.Random(0), written(path, rats())
    right, refused = datasets.rats(), 0
    for _ in range(300):
        path.write_bytes(flipped(content, how))
        try:
            found = datasets.rats()
        except ValueError as error:
            assert "rats_data.npz' is not the file it should be" in str(error)
            refused += 1
        else:
            assert found.names == right.names
            assert all(v.equal(found.fields[k]) for k, v in right.fields.items())
    assert refused > 100


def test_a_result_of_a_study_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "cells" / "run.json"
    keep(file, {"a": 1}, {"score": 1.0})
    assert kept(file) == {"score": 1.0} and kept(tmp_path / "none.json") is None
    for content in (b"", b"{", b"[]", b"{}", b"\x80\x04", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged .*: remove it, and it is computed again"):
            kept(file)
