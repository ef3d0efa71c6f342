"""Study files: what is read, and what is refused, by key, with the nearest known one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hierfl.comparisons.read_study import read
from hierfl.comparisons.study_file import MOST_POINTS, SAME_METHOD, options_of
from hierfl.studies.baseline_methods import BASELINES, baseline
from tests.comparisons.small import GIVEN, study

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "examples" / "studies").glob("*.toml"))
MINIMAL = """
title = "t"
data = { name = "digits", partition = { kind = "equal_classes", clients = 6, train = 16, test = 6 } }
methods = [{ name = "fedavg" }]
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", STUDIES, ids=lambda path: path.stem)
def test_shipped_studies_are_read_in_full_and_quick(file: Path) -> None:
    full, quick = read(file), read(file, quick=True)
    assert quick.run.rounds < full.run.rounds
    assert [e.label for e in quick.methods] == [e.label for e in full.methods]


def test_a_label_is_the_name_where_none_is_given() -> None:
    assert [entry.label for entry in study().methods] == ["fedavg", "individual"]


def test_quick_changes_only_what_it_names(tmp_path: Path) -> None:
    file = written(tmp_path, MINIMAL + "[run]\nrounds = 50\nbatch = 7\n[quick.run]\nrounds = 2\n")
    full, quick = read(file), read(file, quick=True)
    assert (full.run.rounds, quick.run.rounds) == (50, 2)
    assert full.run.batch == quick.run.batch == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MINIMAL + "[run]\nround = 5", ["run.round", "did you mean 'rounds'"]),
        (MINIMAL + "[runs]\nrounds = 5", ["runs", "did you mean 'run'"]),
        (MINIMAL + "[evaluation]\nzzz = 5", ["evaluation.zzz", "known: last_rounds"]),
        (MINIMAL + "[run]\nrounds = 0", ["run.rounds", "greater than 0", "(it is 0)"]),
        (MINIMAL + '[run]\nrounds = "many"', ["run.rounds", "'many'"]),
        (MINIMAL + "[evaluation]\nlast_rounds = 200", ["evaluation.last_rounds", "run.rounds"]),
        (MINIMAL.replace("fedavg", "fedavgg"), ["methods.0", "fedavgg", "did you mean 'fedavg'"]),
        (MINIMAL.replace("fedavg", "fedavg+XX"), ["fedavg+XX", "+FT or +AM"]),
        (MINIMAL.replace('"fedavg"', '"fedavg", settings = { proxx = 1.0 }'), ["'proxx'", "'prox'"]),
        (MINIMAL.replace('"fedavg"', '"fedavg", grid = { lrr = [1.0] }'), ["'lrr'", "did you mean 'lr'"]),
        (MINIMAL.replace('"fedavg" }', '"fedavg" }, { name = "fedavg" }'), ["twice", "labels"]),
        (MINIMAL.replace("digits", "femnist"), ["data", "'femnist' has clients of its own"]),
        (MINIMAL.replace("digits", "digitz"), ["data.name", "digitz"]),
        ('title = "t"\ndata = { name = "digits" }\nmethods = [{ name = "fedavg" }]', ["needs a partition"]),
        ('title = "t"\n[data]\nname = "heart_disease"', ["methods", "required"]),
        ("title = ", ["no TOML"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        read(written(tmp_path, text))
    assert all(part in str(error.value) for part in told), str(error.value)


def test_grids_are_of_one_size_and_no_larger_than_six() -> None:
    grids = [{"name": "fedavg", "grid": {"lr": [0.1, 0.2]}}, {"name": "individual"}]
    with pytest.raises(ValidationError, match="unequal sizes"):
        study(tuning={"rounds": 2}, methods=grids)
    with pytest.raises(ValidationError, match=f"at most {MOST_POINTS}"):
        study(tuning={"rounds": 2, "lr": [0.1 * k for k in range(1, 8)]})
    assert study(methods=grids)  # nothing is tuned: grids are not used


def test_every_baseline_has_options_to_set() -> None:
    for name in BASELINES:
        plain = name.split("+")[0]
        assert "lr" in options_of(plain) and len(options_of(plain)) > 2
    assert set(SAME_METHOD) <= set(BASELINES)


def test_suffixes_go_behind_any_method() -> None:
    assert baseline("pfedme+FT").tunes and not baseline("pfedme").tunes
    assert baseline("fedavg+AM").tunes is False
    with pytest.raises(KeyError, match="no method 'nothing'"):
        baseline("nothing")


def test_the_small_study_is_as_a_file_would_give_it(tmp_path: Path) -> None:
    lines = ['title = "small"', "[data]", 'name = "digits"', 'scaling = "pixel"']
    lines += ["[data.partition]", 'kind = "equal_classes"', "clients = 6", "classes = 2"]
    lines += ["train = 16", "test = 6", "[run]", "rounds = 3", "evaluations = 4", "batch = 8"]
    lines += ["seeds = [0, 1]", "compiled = false", "[evaluation]", "last_rounds = 2", "every = 1"]
    lines += ["[[methods]]", 'name = "fedavg"', "[[methods]]", 'name = "individual"']
    given: dict[str, Any] = tomllib.loads("\n".join(lines))
    assert given == GIVEN and read(written(tmp_path, "\n".join(lines))) == study()
