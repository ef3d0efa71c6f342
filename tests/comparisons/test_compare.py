"""Comparisons that are killed, changed, or fail in part: what is kept, what is computed again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hierfl.cli import app
from hierfl.comparisons import cells, tuning
from hierfl.comparisons.compare import Failed, compare
from hierfl.comparisons.result_files import FILES, RESULTS, TUNED, as_csv, study_of
from hierfl.comparisons.study_file import Study
from tests.comparisons.small import study

TINY = """
title = "tiny"
data = { name = "digits", partition = { kind = "equal_classes", clients = 6, train = 16, test = 6 } }
run = { rounds = 4, evaluations = 4, batch = 8, seeds = [0, 1, 2], compiled = false }
evaluation = { last_rounds = 2, every = 1, new_clients = 1, along = ["clients", "new_clients"], by_class = true }
tuning = { rounds = 4, lr = [0.01, 0.1, 0.3] }
methods = { fedavg = {}, pfedme = {}, "fedavg+FT" = {} }
"""


def files(out: Path) -> dict[str, bytes]:
    """Return the files that are the same for every run of a study."""
    there = [name for name in FILES if name != "costs.csv" and (out / name).exists()]
    return {name: (out / name).read_bytes() for name in there}


def test_a_second_run_computes_nothing_and_lost_pieces_are_made_again(tmp_path: Path) -> None:
    lines: list[str] = []
    own = study(tuning={"rounds": 2, "lr": [0.01, 0.3]})
    assert compare(own, tmp_path, processes=1, say=lines.append) == []
    before, said = files(tmp_path), len(lines)
    assert compare(own, tmp_path, processes=1, say=lines.append) == []
    assert said == 6 and lines[said:] == [] and files(tmp_path) == before
    assert study_of(tmp_path) == own
    pieces = sorted(tmp_path.glob("*/*.json"))
    for piece in pieces[::2]:
        piece.unlink()
    assert compare(own, tmp_path, processes=1, say=lines.append) == []
    assert files(tmp_path) == before and sorted(tmp_path.glob("*/*.json")) == pieces


CHANGES: list[Mapping[str, Any]] = [
    {"run": {"rounds": 4}},
    {"run": {"lr": 0.2}},
    {"data": {"scaling": "one"}},
    {"data": {"partition": {"clients": 5}}},
    {"net": {"hidden": [3]}},
    {"evaluation": {"draws": 3}},
    {"tuning": {"rounds": 2}},
    {"methods": [{"name": "fedavg", "settings": {"prox": 0.1}}]},
    {"methods": [{"name": "fedprox"}]},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_cells_key_holds_what_its_number_depends_on(changes: Mapping[str, Any]) -> None:
    def key(of: Study) -> Path:
        return cells.cell_file(Path(), of, of.methods[0], 0)[0]

    assert key(study(**changes)) != key(study())


def test_a_cells_key_holds_the_code_and_no_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    own = study()
    file = cells.cell_file(Path(), own, own.methods[0], 0)[0]
    assert cells.cell_file(Path(), own, own.methods[0], 1)[0] != file
    more = study(methods=[{"name": "fedavg"}, {"name": "ditto"}], run={"seeds": [0, 5]}, title="x")
    assert cells.cell_file(Path(), more, more.methods[0], 0)[0] == file
    monkeypatch.setattr(cells, "code", lambda: "other")
    assert cells.cell_file(Path(), own, own.methods[0], 0)[0] != file


def test_one_method_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    # a step size at which every trial diverges
    methods: list[dict[str, Any]] = [
        {"name": "fedavg"},
        {"name": "fedprox", "grid": {"lr": [1e30]}},
    ]
    own = study(methods=methods, tuning={"rounds": 2, "lr": [0.1]}, run={"seeds": [0]})
    (failed,) = compare(own, tmp_path, processes=1, say=print)
    assert failed.what == "fedprox: options" and "smaller step sizes" in failed.why
    assert "fedavg" in (tmp_path / RESULTS).read_text()


def test_a_run_that_diverges_is_reported_and_has_no_scores() -> None:
    own = study(run={"lr": 3e38})
    found = cells.computed(own, own.methods[0], {}, 0)
    assert "diverged" in found and found["scores"] == []


def test_a_run_whose_last_round_of_all_diverges_is_reported_and_has_no_scores() -> None:
    # the one step of round 1 leaves weights that are finite; the step after overflows
    own = study(
        net={"hidden": [4]},
        run={"rounds": 1, "evaluations": 1, "lr": 1e25},
        evaluation={"last_rounds": 1, "round_of_all": True},
    )
    found = cells.computed(own, own.methods[0], {}, 0)
    assert "round 1" in found["diverged"] and found["scores"] == []


def test_a_setting_is_refused_before_any_work(tmp_path: Path) -> None:
    own = study(methods=[{"name": "fedavg"}, {"name": "fedprox", "settings": {"prox": -1.0}}])
    with pytest.raises(ValueError, match=r"method 'fedprox': prox is -1\.0"):
        compare(own, tmp_path, processes=1, say=print)
    assert not list(tmp_path.glob("cells/*"))


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    own = study(run={"seeds": [0]}, methods=[{"name": "fedavg"}])
    compare(own, tmp_path, processes=1, say=print)
    (cell,) = (tmp_path / "cells").iterdir()
    cell.write_text("{")
    (failed,) = compare(own, tmp_path, processes=1, say=print)
    assert failed.what == "fedavg, seed 0" and "is damaged" in failed.why


# ------------------------------------------------------------------------------------------- tuning
@pytest.mark.slow
def test_a_search_that_is_resumed_chooses_as_one_that_was_not(tmp_path: Path) -> None:
    own = study(tuning={"rounds": 2, "lr": [0.3, 0.1, 0.01, 0.001]})
    entry = own.methods[0]
    whole = tuning.chosen(tmp_path / "whole", own, entry)
    parted = tmp_path / "parted"
    tuning.chosen(parted, own, entry)
    for trial in sorted((parted / "trials").iterdir())[2:]:
        trial.unlink()
    resumed = tuning.chosen(parted, own, entry)
    assert resumed == {**whole, "computed": 2}


def test_the_best_trial_is_chosen(tmp_path: Path) -> None:
    own = study(tuning={"rounds": 4, "lr": [1e-6, 0.1]})
    found = tuning.chosen(tmp_path, own, own.methods[0])
    assert found["options"] == {"lr": 0.1}
    assert found["trials"][1]["score"] > found["trials"][0]["score"]


def test_nothing_is_tuned_without_rounds(tmp_path: Path) -> None:
    own = study()
    assert tuning.chosen(tmp_path, own, own.methods[0])["options"] == {}
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- the command line
@pytest.mark.slow
@pytest.mark.usefixtures("own_processes")
def test_the_three_commands(tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(TINY + "[quick]\nrun = { rounds = 2, seeds = [0] }\ntuning = { rounds = 0 }\n")
    done = CliRunner().invoke(
        app, ["compare", str(file), "--quick", "--out", str(out), "--processes", "1"]
    )
    assert done.exit_code == 0 and "| fedavg+FT |" in done.output
    shown = CliRunner().invoke(app, ["table", str(out), "--format", "latex"])
    assert shown.exit_code == 0 and r"\begin{tabular}" in shown.output
    page = tmp_path / "RESULTS.md"
    page.write_text(f"# Results\n\n<!-- {out} -->\nearlier\n<!-- end of {out} -->\n\nafter\n")
    put = CliRunner().invoke(app, ["table", str(out), "--into", str(page)])
    text = page.read_text()
    assert (
        put.exit_code == 0 and "| fedavg+FT |" in text and "earlier" not in text and "after" in text
    )
    elsewhere = CliRunner().invoke(
        app, ["table", str(out / "."), "--into", str(tmp_path / "tiny.toml")]
    )
    assert elsewhere.exit_code == 1 and "has no block" in elsewhere.output
    drawn = CliRunner().invoke(app, ["plot", str(out), "--out", str(tmp_path / "figure.svg")])
    assert drawn.exit_code == 0 and (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_words_in_brackets_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "ImportError: install it with pip install 'hierfl[data]'"
    monkeypatch.setattr("hierfl.comparisons.compare.compare", lambda *_, **__: [Failed("one", why)])
    monkeypatch.setattr("hierfl.comparisons.printed_table.markdown", lambda _: "")
    monkeypatch.setattr("hierfl.comparisons.figures.draw", lambda _: [])
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    done = CliRunner().invoke(app, ["compare", str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and f"one failed: {why}" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nothing.toml"], "nothing.toml"),
        (["table", "nowhere"], "holds no results"),
        (["plot", "nowhere"], "holds no results"),
        (["table", "nowhere", "--format", "word"], "neither markdown nor latex"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and message in " ".join(done.output.split())


def test_numbers_keep_all_their_digits() -> None:
    assert as_csv(("a", "b"), [{"a": 0.1 + 0.2, "b": None}]) == "a,b\n0.30000000000000004,\n"
    assert TUNED.endswith(".csv")
