"""The folder of `make demo-flower`: private files, and nothing removed that the script has not made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower_hospitals"))
deploy = pytest.importorskip("deploy", reason="cryptography and flwr are not installed")


def test_files_are_private_and_others_stay(tmp_path: Path) -> None:
    """Also files that are named as this script names its own."""
    names = ("thesis.tex", "model.pt", "north.log", "my-ca.crt", "home/notes.txt", "nodes/a/b.csv")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    made = [deploy.new_folder(tmp_path) for _ in range(2)]
    assert made[0] != made[1] and {one.parent for one in made} == {tmp_path}
    for out in made:
        deploy.settled(out)
        assert out.stat().st_mode & 0o777 == 0o700
        for path in out.rglob("*"):
            public = path.suffix in (".crt", ".pem", ".pub", ".toml")
            assert public or path.stat().st_mode & 0o077 == 0, path
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something already"):
        deploy.settled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
