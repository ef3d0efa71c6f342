"""One node of four lies: the run ends with the three others' posterior, and its history names the liar."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from benchmarks.attacks import hostile_server, lying_nodes
from benchmarks.attacks.lying_nodes import LIAR
from hierfl.core.typed_json import written
from hierfl.formulas.table_answers import table_answer
from hierfl.formulas.time_answers import survival_answer
from hierfl.nodes import Answer, in_process
from hierfl.nodes.describing import DescriptionRequest, answers_by_client
from tests.nodes.lies import JSON_LIES, PLAUSIBLE, lies_of, places, replaced
from tests.sampled import sampled

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = bool(os.environ.get("HIERFL_SLOW"))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """Return a place for the nodes of each method, and for their run in which the liar is silent."""
    return {}


def how(name: str) -> dict[str, Any]:
    return {"late": True} if name == lying_nodes.LATE else {"rounds": 1}


def silenced(name: str, kept: dict[str, Any], folder: Path) -> Any:
    """Return the nodes of a method, and their run in which the liar is silent."""
    if name not in kept:
        made = lying_nodes.around(lying_nodes.runs()[name], folder)
        kept[name] = made, lying_nodes.lied_to(made, None, **how(name))
    return kept[name]


TWELVE = [
    "a negative definite factor",
    "a factor that is not symmetric",
    "single numbers of 1e14",
    "a weight of 1e12",
    "a negative weight",
    "NaN",
    "values of 1e14",
    "another dtype",
    "a name too many",
    "a list",
    "deep JSON",
    "another client",
]


@pytest.mark.slow("exact-a negative definite factor", "two_stage-a negative definite factor")
@pytest.mark.parametrize(
    ("name", "lie"),
    [
        *(("fedavg", lie) for lie in [*lying_nodes.LIES, *lying_nodes.BYTES]),
        *sampled(
            [("exact", lie) for lie in TWELVE[:5]], 3
        ),  # the others are of no method's numbers
        *sampled([("two_stage", lie) for lie in TWELVE[:7]], 3),
        *sampled([("fedsvi", lie) for lie in [*TWELVE[2:7], "values of -1e14", "infinity"]], 3),
        *sampled([("pvi", lie) for lie in TWELVE[:1]], ()),
        # about weights alone
        *sampled([(lying_nodes.LATE, lie) for lie in ("values of 1e14", "another shape")], ()),
    ],
)
def test_a_run_ends_without_the_liar_and_names_it(
    name: str, lie: str, kept: dict[str, Any], tmp_path: Path
) -> None:
    made, silent = silenced(name, kept, tmp_path)
    ended = lying_nodes.lied_to(made, lie, **how(name))
    assert ended.lied and lying_nodes.is_named(ended), ended.fit.history["left_out"]
    assert lying_nodes.same(ended, silent)


@pytest.mark.slow("exact-43")
@pytest.mark.parametrize(("name", "step"), [("fedavg", 7), ("fedsvi", 31), ("exact", 43)])
def test_a_lie_in_a_field_of_an_update_is_not_silent(
    name: str, step: int, kept: dict[str, Any], tmp_path: Path
) -> None:
    made, silent = silenced(name, kept, tmp_path)
    honest = next(of for (client, _), of in made.first_answers.items() if client == LIAR)
    for what, content in list(lies_of(honest))[:: 1 if EVERY else step]:
        ended = lying_nodes.lied_to(made, saying(content), rounds=1)
        is_named = lying_nodes.is_named(ended) and lying_nodes.same(ended, silent)
        assert is_named or content == honest or what.endswith(PLAUSIBLE), what


def saying(content: bytes) -> Any:
    return lambda honest: content


ANSWERS: dict[str, Any] = {
    "summaries": lambda fit: fit.local_summary(50),
    "draws": lambda fit: fit.local_draws(50),
    "predictions": lambda fit: fit.predict(draws=50),
    "scores": lambda fit: fit.scores(draws=50),
}


@pytest.fixture
def fitted(kept: dict[str, Any], tmp_path: Path) -> Any:
    """Return a fit over four nodes that let everything leave."""
    if "fitted" not in kept:
        data = lying_nodes.runs()["exact"][1]
        for name in data.names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "policy.toml").write_text(f"may_leave = {[*ANSWERS, 'rows']}\n")
        model: Any = hierfl.models.regression("gaussian", centered=True)
        method, nodes = hierfl.methods.fedsvi(model), in_process(data, tmp_path)
        kept["fitted"] = hierfl.nodes.fit(method, nodes, rounds=1)
    return kept["fitted"]


@pytest.mark.slow("summaries")
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_lie_after_the_rounds_is_not_silent_and_takes_no_other_answer(
    kind: str, fitted: Any
) -> None:
    honest: dict[str, bytes] = {}

    def asked(contents: Any) -> Iterator[Answer]:
        for answer in fitted.ask(contents):
            honest[answer.client] = answer.content
            yield answer

    whole = ANSWERS[kind](replace(fitted, ask=asked))
    assert [*whole.given] == [*fitted.clients], whole.withheld
    silent = []
    for what, content in lies_of(honest[LIAR]):
        answers = {**honest, LIAR: content}
        lied = replace(fitted, ask=lambda of, all=answers: [Answer(n, all[n]) for n in of])
        given = ANSWERS[kind](lied).given
        assert {*given} >= {*fitted.clients} - {LIAR}, what
        silent += [what] * (LIAR in given and content != honest[LIAR])
    assert all(what.endswith(PLAUSIBLE) or what == "round 1099511627776" for what in silent), silent
    assert not [what for what in silent if "sd" in what and what.endswith("-7")]


TEXT, KINDS = "time | event(ill) ~ x + (1 | h)", ("x", "ill", "sex")


@pytest.mark.parametrize("kind", ["table", "times"])
def test_a_lie_in_a_description_is_not_silent(kind: Any) -> None:
    declared = hierfl.formula(TEXT, "weibull", clients="h").declared
    rng, honest = np.random.default_rng(0), {}
    for name in lying_nodes.NAMES:
        x, sex = rng.normal(50.0, 9.0, 80), rng.choice(["f", "m"], 80)
        times, ill = rng.exponential(9.0, 80).round(1) + 0.1, rng.integers(0, 2, 80)
        frame = pd.DataFrame({"x": x, "sex": sex, "time": times, "ill": ill})
        made: Any = table_answer(frame, KINDS, "sex", name, 5)
        if kind == "times":
            made = survival_answer(frame, declared, "sex", name, 5)
        honest[name] = {"client": name, "answer": json.loads(written(made))}
    question = DescriptionRequest(kind, 5, "sex", KINDS if kind == "table" else ())

    def left_out(path: Any, lie: str) -> Any:
        said = {**honest, LIAR: replaced(honest[LIAR], path, lie)}
        read = {name: json.dumps(of).encode() for name, of in said.items()}
        return {*answers_by_client(read, question)[1]}, said[LIAR] == honest[LIAR]

    silent, every = [], list(product(places(honest[LIAR]), JSON_LIES))
    for path, lie in every[:: 1 if EVERY else 3]:
        names, is_true = left_out(path, lie)
        assert names <= {LIAR}, (path, lie)
        silent += [((None, *path)[-1], lie)] * (not names and not is_true)
    # a name; a column, or sums, that are said to be of few rows; ones of other values; events and a
    # time of 0; a group that others do not have
    assert {*silent} <= {
        *(("client", "a text"), ("numbers", "null"), ("levels", "null"), ("logrank", "null")),
        *(("ones", "null"), (0, "0"), ("f", "one too many"), ("m", "one too many")),
    }


def test_a_hostile_server_reads_no_row() -> None:
    found = hostile_server.attack(36, seed=1)
    assert found["wrong"] == found["raw"] == 0 and found["refused"] > 20
