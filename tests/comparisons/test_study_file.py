"""Study files: what is read, and what is refused, by key, with the nearest known one."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hierfl.comparisons import cells
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.read_study import chosen, read
from hierfl.comparisons.study_file import MOST_POINTS, Study
from hierfl.optimizers import SGD, Adam
from hierfl.program.sites import recipe_of
from hierfl.studies.baseline_methods import baseline
from tests.comparisons.small import MINIMAL, study

LINES = """
title = "t"
data = { name = "fedabml_lines" }
methods = { fedavg = {} }
evaluation = { metric = "explained", by_class = false }
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(text)
    return file


VARIANTS = """
[variants.short]
run = { rounds = 3 }

[variants.tuned]
tuning = { rounds = 2 }
methods = { one = { settings = { prox = 0.5 } } }
quick = { run = { batch = 3 } }

[quick]
run = { rounds = 1 }
"""


def test_variants_are_studies_with_changes_of_their_own(tmp_path: Path) -> None:
    full, quick = (read(written(tmp_path, MINIMAL + VARIANTS), quick=q) for q in (False, True))
    assert list(full) == ["short", "tuned"]
    assert (full["short"].run.rounds, quick["short"].run.rounds) == (3, 1)
    assert (full["tuned"].run.rounds, full["tuned"].tuning.rounds) == (100, 2)
    assert [(own["tuned"].run.rounds, own["tuned"].run.batch) for own in (full, quick)] == [
        (100, 20),
        (1, 3),
    ]
    assert full["tuned"].methods[0].settings == {"prox": 0.5}
    assert full["short"].methods[0].settings == {}
    assert chosen(full, None) == ["short", "tuned"] and chosen(full, ["tuned"]) == ["tuned"]
    with pytest.raises(ValueError, match="choose from short, tuned"):
        chosen(full, ["shorter"])
    with pytest.raises(ValueError, match=r"variant 'short'.*not a study"):
        read(written(tmp_path, MINIMAL + "[variants.short]\nrun = { roundz = 3 }"))


def test_a_method_that_is_left_out_is_not_compared(tmp_path: Path) -> None:
    text = MINIMAL.replace("methods", 'leave_out = ["one"]\nmethods').replace(
        "one =", "fedbn = {}, one ="
    )
    assert [entry.label for entry in read(written(tmp_path, text))[""].methods] == ["fedbn"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[run]\nround = 5", ["run: round", "did you mean 'rounds'"]),
        (MINIMAL + "[runs]\nrounds = 5", ["runs", "did you mean 'run'"]),
        (MINIMAL + "[evaluation]\nzzz = 5", ["evaluation: zzz", "use last_rounds"]),
        (MINIMAL + "[run]\nrounds = 0", ["run.rounds", "greater than 0", "(it is 0)"]),
        (MINIMAL + '[run]\nrounds = "many"', ["run.rounds", "'many'"]),
        (MINIMAL + "[evaluation]\nlast_rounds = 200", ["evaluation.last_rounds", "run.rounds"]),
        (MINIMAL.replace("fedavg", "fedavgg"), ["methods.one", "fedavgg", "did you mean 'fedavg'"]),
        (MINIMAL.replace("fedavg", "fedavg+XX"), ["fedavg+XX", "+FT, +AM, +rows"]),
        (MINIMAL.replace('"fedavg"', '"fedavg", settings = { proxx = 1.0 }'), ["'proxx'", "'prox'"]),
        (MINIMAL.replace('"fedavg"', '"fedavg", grid = { lrr = [1.0] }'), ["'lrr'", "did you mean 'lr'"]),
        (MINIMAL.replace("methods", 'leave_out = ["two"]\nmethods'), ["leave_out", "no method 'two'"]),
        (MINIMAL.replace("methods", 'leave_out = ["one"]\nmethods'), ["methods", "at least 1"]),
        (MINIMAL.replace("one =", "fedavgg = {}, one ="), ["methods.fedavgg", "'fedavgg'", "did you mean 'fedavg'"]),
        (MINIMAL.replace("digits", "femnist"), ["data", "'femnist' has clients of its own"]),
        (MINIMAL.replace("digits", "digitz"), ["data.name", "digitz"]),
        ('title = "t"\ndata = { name = "digits" }\nmethods = { fedavg = {} }', ["needs a partition"]),
        ('title = "t"\n[data]\nname = "heart_disease"', ["methods", "required"]),
        (MINIMAL.replace("train = 16", "authors_labels = true"), ["authors_labels", "'power_law'"]),
        (MINIMAL + "[evaluation]\njoin_rounds = [0]", ["evaluation.join_rounds.0", "greater than 0"]),
        (MINIMAL + '[evaluation]\nmetric = "explained"', ["evaluation.metric", "'digits' has classes"]),
        ('title = "t"\ndata = { name = "radon" }\nmethods = { fedavg = {} }',
         ["'radon' has real labels", "'explained'"]),
        ('title = "t"\ndata = { name = "radon" }\nevaluation = { metric = "explained" }\nmethods = { fedpac = {} }',
         ["methods.fedpac", "needs classes"]),
        (MINIMAL + '[evaluation]\nalong = ["clients"]', ["there are no curves: put in 'every'"]),
        (MINIMAL + '[evaluation]\nevery = 1\nalong = ["new_clients"]', ["there are no new clients"]),
        (LINES + "net = { hidden = [3] }", ["is of lines: leave out 'hidden'"]),
        (LINES.replace("by", "calibration = true, by"), ["'by_class' and 'calibration' are of classes"]),
        ("title = ", ["not a TOML"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        read(written(tmp_path, text))
    assert all(part in str(error.value) for part in message), str(error.value)


def test_grids_are_of_one_size_and_no_larger_than_six() -> None:
    grids: list[dict[str, Any]] = [
        {"name": "fedavg", "grid": {"lr": [0.1, 0.2]}},
        {"name": "local_only"},
    ]
    with pytest.raises(ValidationError, match="unequal sizes"):
        study(tuning={"rounds": 2}, methods=grids)
    with pytest.raises(ValidationError, match=f"at most {MOST_POINTS}"):
        study(tuning={"rounds": 2, "lr": [0.1 * k for k in range(1, 8)]})
    assert study(methods=grids)  # nothing is tuned: grids are not used


def built(own: Study, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the recipe of a study's first method."""
    rows = of_study(own, 0)
    method = cells.method_of(own, own.methods[0], options, rows, 3, 0)
    recipe = recipe_of(method)
    assert recipe is not None
    return dict(recipe.options)


def test_an_optimizer_is_built_with_the_step_size() -> None:
    own = study(methods=[{"name": "fedavg", "settings": {"optimizer": "adam"}}], run={"adam": 0.03})
    assert built(own, {"lr": 0.02})["optimizer"] == Adam(0.02)
    assert built(own, {})["optimizer"] == Adam(0.03)


def test_the_step_size_that_is_chosen_is_put_into_settings() -> None:
    own = study(methods=[{"name": "pfedme", "settings": {"global_optimizer": "sgd"}}])
    found = built(own, {"lr": 0.02})
    assert found["global_optimizer"] == found["optimizer"] == SGD(0.02)


@pytest.mark.parametrize(("counts_steps", "steps"), [(False, 4), (True, 20)])
def test_evaluations_or_steps_are_counted(counts_steps: bool, steps: int) -> None:
    own = study(methods=[{"name": "pfedme"}], run={"evaluations": 20, "counts_steps": counts_steps})
    assert built(own, {})["steps"] == steps


def test_suffixes_go_behind_any_method() -> None:
    assert baseline("pfedme+FT").tunes and not baseline("pfedme").tunes
    assert baseline("fedavg+AM").tunes is False
    with pytest.raises(KeyError, match="no method 'nothing'"):
        baseline("nothing")
