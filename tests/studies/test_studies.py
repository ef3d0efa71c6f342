"""The command `hierfl study`: its output and files, its errors, and that finished runs are not repeated."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from hierfl import cli, studies
from hierfl.studies.results import Found, Say, kept, put_into, quiet


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["study", *arguments])


def a_study(worked: list[int]) -> Callable[..., Found]:
    """Return a study of two runs; each run appends its seed to `worked` when it is computed."""

    def run(out: Path, *, quick: bool = False, say: Say = quiet) -> Found:
        def work(seed: int) -> dict[str, Any]:
            worked.append(seed)
            return {"accuracy": 90.0 + seed}

        found = [
            kept(out, f"sgd-{s}", {"seed": s, "quick": quick}, lambda s=s: work(s), say)  # type: ignore[misc]
            for s in (0, 1)
        ]
        scores = pd.DataFrame([{"method": "sgd", "seed": s, **n} for s, n in enumerate(found)])
        path = out / "scores.csv"
        scores.to_csv(path, index=False)
        return Found(
            "accuracy, %",
            scores.groupby("method")[["accuracy"]].mean(),
            scores,
            ["it rose"],
            {path: "every score"},
        )

    return run


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seeds: list[int] = []
    monkeypatch.setitem(studies.STUDIES, "climb", ("climb",))
    module = types.SimpleNamespace(run=a_study(seeds))
    monkeypatch.setattr(
        studies, "import_module", lambda name: {"hierfl.studies.climb": module}[name]
    )
    return seeds


def test_study_prints_its_table_and_files_and_ends_with_json(
    worked: list[int], tmp_path: Path
) -> None:
    result = command("climb", "--quick", "--json", "--out", str(tmp_path / "made" / "here"))
    assert result.exit_code == 0, result.output
    assert "90.50" in result.stdout and "it rose" in result.stdout and "scores.csv" in result.stdout
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["study"], told["quick"]) == ("climb", True)
    assert told["parts"][0]["scores"] == [
        {"method": "sgd", "seed": s, "accuracy": 90.0 + s} for s in (0, 1)
    ]
    assert told["parts"][0]["table"] == [{"method": "sgd", "accuracy": 90.5}]


def test_finished_runs_are_not_repeated_but_other_settings_are_run(
    worked: list[int], tmp_path: Path
) -> None:
    for arguments, expected in (((), [0, 1]), ((), [0, 1]), (("--quick",), [0, 1, 0, 1])):
        assert command("climb", "--out", str(tmp_path), *arguments).exit_code == 0
        assert worked == expected
    next((tmp_path / "runs").glob("sgd-1-*.json")).unlink()
    assert not list((tmp_path / "runs").glob("*.tmp"))
    command("climb", "--out", str(tmp_path))
    command("climb", "--out", str(tmp_path), "--quick")
    assert worked == [0, 1, 0, 1, 1], "only the deleted run is repeated"


def test_a_failed_run_saves_nothing(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        kept(tmp_path, "x", {}, fails)
    assert (
        kept(tmp_path, "x", {}, lambda: {"a": 0.1}) == {"a": 0.1} == kept(tmp_path, "x", {}, fails)
    )


def test_a_study_writes_its_numbers_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- climb -->\nold 1.0\n<!-- end of climb -->\nafter\n")
    found = a_study([])(tmp_path)
    put_into(page, "climb", [found])
    text = page.read_text()
    put_into(page, "climb", [found])
    assert page.read_text() == text, "the block is replaced, not added to"
    assert text.startswith("before\n<!-- climb -->\naccuracy, %:\n\n| method | accuracy |")
    assert "| sgd | 90.50 |" in text and "* it rose" in text and "old" not in text
    assert text.endswith("<!-- end of climb -->\nafter\n")
    with pytest.raises(ValueError, match="no block 'descent'"):
        put_into(page, "descent", [found])


def test_an_unknown_name_lists_the_studies(worked: list[int], tmp_path: Path) -> None:
    result = command("clim", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert (
        "there is no study 'clim'" in " ".join(result.output.split()) and "climb" in result.output
    )
    with pytest.raises(KeyError, match="climb"):
        next(studies.run("clim", tmp_path))


def test_a_folder_that_cannot_be_written_to_is_named(worked: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command("climb", "--out", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2 and "--out" in result.output and not worked


def test_missing_data_set_is_reported_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(out: Path, *, quick: bool = False, say: Say = quiet) -> Found:
        raise FileNotFoundError("HIERFL_DATA is not set: get MNIST")

    monkeypatch.setitem(studies.STUDIES, "digits", ("digits",))
    monkeypatch.setattr(studies, "import_module", lambda name: types.SimpleNamespace(run=run))
    result = command("digits", "--out", str(tmp_path))
    assert result.exit_code == 1 and "get MNIST" in result.output
