"""The folder of `make demo-flower`: private files, and nothing removed that the script has not made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower_hospitals"))
deploy = pytest.importorskip("deploy", reason="cryptography and flwr are not installed")


def test_files_are_private_and_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # again in the same folder
        deploy.settled(out)
        for path in out.rglob("*"):
            public = path.name == "mine.txt" or path.suffix in (".crt", ".pem", ".pub", ".toml")
            assert public or path.stat().st_mode & 0o077 == 0, path
        assert out.stat().st_mode & 0o777 == 0o700
        (out / "mine.txt").write_text("mine")
    assert (out / "mine.txt").read_text() == "mine"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="has not made"):
        deploy.settled(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
