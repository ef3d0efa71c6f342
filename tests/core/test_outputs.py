"""Outputs for users: files that hierfl did not write stay, and a file is replaced whole or not at all."""

import errno
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hierfl
from hierfl import cli
from hierfl.core.disk import WRITTEN, CannotWrite, claim, replace_text
from hierfl.demo.run import FILES
from hierfl.methods import fedsvi
from tests.programs import federation, fit, regression


def test_files_of_others_are_refused_and_ones_own_are_not(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("mine")
    with pytest.raises(FileExistsError, match=r"scores.csv' is there already.*name another folder"):
        claim(tmp_path, ["figure.png", "scores.csv"])
    assert (tmp_path / "scores.csv").read_text() == "mine" and not (tmp_path / WRITTEN).exists()
    claim(tmp_path / "new", ["scores.csv"])
    (tmp_path / "new" / "scores.csv").write_text("written by hierfl")
    claim(tmp_path / "new", ["scores.csv"])
    claim(tmp_path / "new", ["other.csv"])
    claim(tmp_path / "new", ["scores.csv", "other.csv"])


@pytest.mark.parametrize("command", [["demo"], ["compare", "digits"]])
def test_the_command_line_keeps_users_files(command: list[str], tmp_path: Path) -> None:
    for name in ("scores.csv", "results.csv", ".hierfl"):
        (tmp_path / name).write_text("mine")
    told = CliRunner().invoke(cli.app, [*command, "--quick", "--out", str(tmp_path)])
    assert told.exit_code == 2
    words = re.sub(r"[\s│]+", " ", told.output)
    assert "is there already, and hierfl did not write it" in words
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hierfl", "results.csv", "scores.csv"]


def test_a_folder_is_tried_without_touching_what_is_there(tmp_path: Path) -> None:
    (tmp_path / ".hierfl").write_text("mine")
    claim(tmp_path, FILES)
    assert (tmp_path / ".hierfl").read_text() == "mine"
    assert len(FILES) == 5


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    fitted = fit(fedsvi(regression), federation(), rounds=1)
    notes = tmp_path / "notes.html"
    notes.write_text("<html>mine</html>")
    for place in (notes, tmp_path):
        with pytest.raises(FileExistsError, match="is not a report of hierfl: name another path"):
            fitted.report(place)
    assert notes.read_text() == "<html>mine</html>"
    for _ in range(2):
        page = fitted.report(tmp_path / "report.html", draws=20, site="y")
    assert isinstance(page.path, Path) and page.path.stat().st_size > 1000
    assert isinstance(fitted, hierfl.Fit)


def test_a_text_is_replaced_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "there" / "page.html", tmp_path / "page.html"
    target.parent.mkdir()
    link.symlink_to(target)
    replace_text(link, "one")
    assert link.is_symlink() and target.read_text() == "one"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=r"page.html' cannot be written \(3 bytes: No space left"):
        replace_text(link, "two")
    assert target.read_text() == "one" and [p.name for p in target.parent.iterdir()] == [
        "page.html"
    ]
