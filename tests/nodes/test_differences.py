"""A new patient is in no difference of what nodes answer: over fits, formulas, programs, schemas and times."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl import guides, methods
from hierfl.cli.officer_page import entries
from hierfl.nodes import TooFewNodes, in_process
from hierfl.nodes.agreed_schema import agreed_over
from hierfl.nodes.policy import Forbidden
from hierfl.summaries.row_noise import RowNoise
from tests.nodes.one_process import lone
from tests.nodes.test_account import ask
from tests.nodes.test_agreed_schema import asked_of
from tests.nodes.test_row_sets import MORE, WHY, A, X, corrected, frame, joined
from tests.programs import federation

REVEALS = f"{WHY}|would tell of fewer than 5 of them"


def parts(north: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {"north": north, "south": frame(90, 11), "west": frame(80, 12)}


def formula(text: str, **options: Any) -> Any:
    return hierfl.formula(text, clients="site", **options)


FORMULA = "bmi ~ age + (1 | site)"


def answers(of: Any, folder: Path) -> bool:
    """Return whether a run of its own gets an answer of all nodes."""
    try:
        nodes = in_process(of, folder, fewest=len(of))
        hierfl.nodes.fit(formula(FORMULA), nodes, rounds=1)
    except (Forbidden, TooFewNodes) as error:
        assert "rows have changed" in str(error)
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_a_new_patient_is_not_in_the_difference_of_two_fits(tmp_path: Path) -> None:
    fit = hierfl.nodes.fit(formula(FORMULA), in_process(parts(A), tmp_path))
    for north in (joined(A, X), A[1:], corrected(1)):
        with pytest.raises((Forbidden, TooFewNodes), match=REVEALS):
            fit.updated(in_process({"north": north}, tmp_path))
    assert not answers(parts(joined(A, X)), tmp_path)  # another run, of another schema
    later = fit.updated(in_process({"north": joined(A, MORE)}, tmp_path))
    assert later.clients == fit.clients
    with pytest.raises((Forbidden, TooFewNodes), match=REVEALS):
        later.updated(in_process({"north": joined(A, MORE[:1])}, tmp_path))
    assert answers(parts(A), tmp_path)  # the rows as they were


@pytest.mark.filterwarnings("ignore")
def test_other_columns_weights_and_ways_to_drop_rows_are_compared_too(tmp_path: Path) -> None:
    short = A.assign(time=np.r_[np.nan, A["time"][1:]])
    hierfl.nodes.fit(formula(FORMULA), in_process(parts(short), tmp_path), rounds=1)
    for text in ("bmi ~ age + time + (1 | site)", "bmi | weights(time) ~ age + (1 | site)"):
        with pytest.raises((Forbidden, TooFewNodes), match=REVEALS):
            nodes = in_process(parts(short), tmp_path, fewest=3)
            hierfl.nodes.fit(formula(text, missing="drop"), nodes, rounds=1)


def test_a_program_over_nodes_is_no_other_way(tmp_path: Path) -> None:
    def fitted(north: pd.DataFrame, model: Any) -> Any:
        every = pd.concat(parts(north), names=["site"]).reset_index(level=0)
        own: dict[str, Any] = {"x": every[["age"]].to_numpy(float), "y": every["bmi"].to_numpy()}
        data = hierfl.ClientData.from_arrays(every["site"].to_numpy(), **own)
        return hierfl.nodes.fit(model, in_process(data, tmp_path, fewest=3), rounds=1)

    model: Any = hierfl.models.regression("gaussian", centered=True)
    fitted(A, methods.fedsvi(model, guide=guides.mean_field))
    with pytest.raises((Forbidden, TooFewNodes), match=REVEALS):
        fitted(joined(A, X), methods.fedsvi(model, guide=guides.delta))


@pytest.mark.filterwarnings("ignore")
def test_times_and_schema_are_of_the_same_rows(tmp_path: Path) -> None:
    """A patient without an age has a time: 200 times would leave, and 199 rows in the schema."""
    text = "time | event(ill) ~ age + (1 | site)"
    north = A.assign(age=np.r_[np.nan, A["age"][1:]], ill=A["ill"])
    survival = formula(text, family="weibull", missing="drop")
    for first in ("times", "schema"):
        nodes = in_process(parts(north), tmp_path / first)
        for name in parts(north):
            (tmp_path / first / name).mkdir(parents=True)
            policy = 'may_leave = ["descriptions"]\n'
            (tmp_path / first / name / "policy.toml").write_text(policy)
        if first == "times":
            hierfl.kaplan_meier(nodes, survival)
        agreed_over(survival, asked_of(parts(north), tmp_path / first, survival))
        hierfl.kaplan_meier(nodes, survival)
        told = [
            line for line in entries(tmp_path / first / "north") if "description" in line["what"]
        ]
        assert {json.loads(line["text"])["answer"]["groups"][""]["rows"] for line in told} == {199}


@pytest.mark.slow("True")
@pytest.mark.parametrize("budget", [False, True])
def test_noise_of_the_servers_choice_is_no_way_around(budget: bool, tmp_path: Path) -> None:
    """An epsilon of 1e8 is no noise; under a budget of the owner answers need no comparison."""

    def asked(count: int, noise: RowNoise | None) -> None:
        own = federation((60,)).fields
        part = hierfl.ClientData.from_clients({"a": {k: own[k][:count] for k in "xy"}})
        model: Any = hierfl.models.regression("gaussian", centered=True)
        method = methods.two_stage(model, draws=100, row_noise=noise)
        ask(lone(method, part, tmp_path, seed=count), 0)

    noise = RowNoise(epsilon=1e8, delta=1e-3, max_row_norm=2.0, max_response=3.0)
    if budget:
        (tmp_path / "policy.toml").write_text("epsilon = 1e10\ndelta = 1e-3")
    asked(50, noise)
    with nullcontext() if budget else pytest.raises(Forbidden, match=REVEALS):
        asked(51, noise if budget else None)
