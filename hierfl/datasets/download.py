"""Data sets from the Hugging Face Hub, saved once they match a checksum of the official files."""

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hierfl.core.disk import replace_bytes
from hierfl.core.extras import extras_for
from hierfl.datasets.files import VARIABLE, Arrays, read_arrays

PARTS = ("train", "test")


@dataclass(frozen=True)
class Remote:
    """An image set on the Hub; `rows` is the checksum in any order of rows, `whole` in the official one."""

    repository: str
    file: str
    rows: str
    whole: str


REMOTES = {
    "mnist": Remote(
        "ylecun/mnist",
        "mnist.npz",
        "f771933d03a86cc5f6899b91d168d95717c342a985562a4a2b5d8d2517a4cb24",
        "f65fef2b1968fb238d8b39ec53f4c6eec775375e8a5262ede2f873571c886e40",
    ),
    "fashion_mnist": Remote(
        "zalando-datasets/fashion_mnist",
        "fashion_mnist.npz",
        "4de292442a22996b5d72c79883ebd803d1eb19709f86b3eb7c24b5f4c7be93a1",
        "ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    ),
}


def get(name: str, folder: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Download a data set to a folder (None: HIERFL_DATA); check the archive if it is there."""
    if name not in REMOTES:
        raise ValueError(
            f"'{name}' cannot be downloaded: choose from {', '.join(REMOTES)}. docs/data.md says "
            "what the file of any other data set holds"
        )
    variable = os.environ.get(VARIABLE)
    if folder is None and not variable:
        raise ValueError(f"there is no folder to save to: set {VARIABLE}, or give --folder")
    remote, path = REMOTES[name], (folder or Path(str(variable))) / REMOTES[name].file
    if path.exists():
        arrays = read_arrays(path, [f"{kind}_{part}" for kind in "xy" for part in PARTS], {})
        say(f"{path} is there already{checked(remote, arrays)}")
        return path
    arrays = downloaded(remote)
    order = checked(remote, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    replace_bytes(path, content.getvalue())
    say(f"{path} is saved{order}; set {VARIABLE}={path.parent.absolute()} to read it")
    return path


def downloaded(remote: Remote) -> Arrays:
    """Return the arrays x_train, y_train, x_test and y_test of a set on the Hub."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # nobody is told what is downloaded
    with extras_for("a download"):
        from flwr_datasets import FederatedDataset
    arrays: dict[str, NDArray[Any]] = {}
    try:
        source = FederatedDataset(dataset=remote.repository, partitioners={}, shuffle=False)
        for part in PARTS:
            rows = source.load_split(part).with_format("numpy")
            arrays[f"x_{part}"] = np.asarray(rows["image"], dtype=np.uint8)
            arrays[f"y_{part}"] = np.asarray(rows["label"], dtype=np.uint8)
    except Exception as error:  # of requests, datasets, the Hub's client or Pillow
        raise ConnectionError(
            f"'{remote.repository}' could not be downloaded from the Hugging Face Hub: {error} "
            f"({type(error).__name__}); offline, save '{remote.file}' to the folder of {VARIABLE} "
            "yourself"
        ) from error
    return arrays


def checked(remote: Remote, arrays: Arrays) -> str:
    """Return what is to be said of the order of rows: nothing where it is the official one."""
    if checksum(arrays) == remote.whole:
        return ", with the checksum of the official files"
    digest = checksum_of_rows(arrays)
    if digest != remote.rows:
        raise ValueError(
            f"{remote.file} is not the data set: its checksum is {digest}, not {remote.rows}; "
            "remove it, or tell us"
        )
    return ", with the official rows in another order: partitions differ from those of our tables"


def checksum(arrays: Arrays) -> str:
    """Return a digest of the images and labels of both parts, in their order."""
    digest = hashlib.sha256()
    for part in PARTS:
        digest.update(arrays[f"x_{part}"].astype(np.uint8).tobytes())
        digest.update(arrays[f"y_{part}"].astype(np.uint8).tobytes())
    return digest.hexdigest()


def checksum_of_rows(arrays: Arrays) -> str:
    """Return a digest of the images and labels of both parts, in any order within a part."""
    digest = hashlib.sha256()
    for part in PARTS:
        x, y = (arrays[f"{kind}_{part}"].astype(np.uint8) for kind in "xy")
        rows = (
            hashlib.sha256(image.tobytes() + label.tobytes()).digest()
            for image, label in zip(x, y, strict=True)
        )
        digest.update(b"".join(sorted(rows)))
    return digest.hexdigest()
