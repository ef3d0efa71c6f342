"""Downloads: what is saved is what `hierfl.datasets` reads, and nothing else is saved."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import hierfl
from hierfl.cli import app
from hierfl.datasets import download
from hierfl.datasets.files import Arrays

SIZES = {"train": 30, "test": 20}


def arrays() -> Arrays:
    generator = np.random.default_rng(0)
    found = {}
    for part, n in SIZES.items():
        found[f"x_{part}"] = generator.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        found[f"y_{part}"] = (np.arange(n) % 10).astype(np.uint8)
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Arrays], None]:
    """Return what puts images onto a local hub, as the Hugging Face Hub gives them."""

    def put(given: Arrays) -> None:
        parts = {}
        for part in SIZES:
            columns = {
                "image": [Image.fromarray(image) for image in given[f"x_{part}"]],
                "label": given[f"y_{part}"].astype(np.int64).tolist(),
            }
            parts[part] = datasets.Dataset.from_dict(columns)
        whole = datasets.DatasetDict(parts)
        monkeypatch.setattr(datasets, "load_dataset", lambda **_: whole)

    known = arrays()
    whole, rows = download.checksum(known), download.checksum_of_rows(known)
    remote = replace(download.REMOTES["mnist"], whole=whole, rows=rows)
    monkeypatch.setitem(download.REMOTES, "mnist", remote)
    return put


def test_what_is_saved_is_read(
    hub: Callable[[Arrays], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(arrays())
    monkeypatch.setenv("HIERFL_DATA", str(tmp_path / "new"))
    done = CliRunner().invoke(app, ["data", "get", "mnist"])
    assert done.exit_code == 0 and "is saved, with the checksum" in done.output
    train, test = hierfl.datasets.mnist()
    assert (len(train), len(test)) == (30, 20)
    expected = torch.tensor(arrays()["x_train"]).float() / 255.0
    torch.testing.assert_close(train.x[:, 0], expected.to(train.x.dtype))
    again = CliRunner().invoke(app, ["data", "get", "mnist"])
    assert again.exit_code == 0 and "is there already, with the checksum" in again.output


def test_rows_in_another_order_are_told(hub: Callable[[Arrays], None], tmp_path: Path) -> None:
    hub({name: value[::-1] for name, value in arrays().items()})
    said: list[str] = []
    download.get("mnist", tmp_path, said.append)
    assert "another order" in said[0]


@pytest.mark.parametrize("name", ["x_train", "y_test"])
def test_other_rows_are_not_saved(name: str, hub: Callable[[Arrays], None], tmp_path: Path) -> None:
    other = dict(arrays())
    other[name] = other[name].copy()
    other[name][3] ^= 1
    hub(other)
    done = CliRunner().invoke(app, ["data", "get", "mnist", "--folder", str(tmp_path)])
    assert done.exit_code == 1 and "is not the data set: its checksum is" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_that_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"mnist\.npz"):
        download.get("mnist", tmp_path)


def test_the_message_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConnectionError, match=r"could not be downloaded.*no network.*offline,"):
        download.get("mnist", tmp_path)


def test_what_cannot_be_downloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIERFL_DATA", raising=False)
    with pytest.raises(ValueError, match="choose from mnist, fashion_mnist"):
        download.get("cifar10")
    with pytest.raises(ValueError, match="set HIERFL_DATA, or give --folder"):
        download.get("mnist")


@pytest.mark.skipif("HIERFL_DATA" not in os.environ, reason="the files are read from HIERFL_DATA")
@pytest.mark.parametrize("name", sorted(download.REMOTES))
def test_the_checksums_are_those_of_the_official_files(name: str) -> None:
    said: list[str] = []
    path = Path(os.environ["HIERFL_DATA"]) / download.REMOTES[name].file
    assert download.get(name, path.parent, said.append) == path
    assert "with the checksum of the official files" in said[0]
