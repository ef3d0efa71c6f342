"""One node of four lies in a field of an answer before the rounds: no run ends, and no lie is silent.

Answers are judged where the server reads them; honest ones are computed once. A few fits go end to end.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.core.typed_json import read_as, written
from hierfl.formulas.questions import Question, own_answer
from hierfl.nodes import Answer, over, station
from hierfl.nodes.agreed_schema import agreed_over
from hierfl.nodes.envelope import read_answer, read_request, write_answer

LIAR, NODES = "north", ("east", "north", "south", "west")
FORMULAS = {
    "scale": hierfl.formula("y ~ scale(x) + sex + (1 | hospital)", "gaussian", clients="hospital"),
    "curves": hierfl.formula(
        "y ~ s(x, k=4) + poly(z, 2) + sex + (1 | ward) + (1 | hospital)", clients="hospital"
    ),
}
FORMULA = FORMULAS["scale"]
EVERY = bool(os.environ.get("HIERFL_SLOW"))
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
LIES: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "1e308": 1e308,
    "-1e308": -1e308,
    "0": 0,
    "-7": -7,
    "2 ** 40": 1 << 40,
    "a text": "lie",
    "null": None,
    "a list": [1, 2],
    "a dict": {"lie": 1},
    "deep": DEEP,
}
# sums of curves, and of third and fourth powers: other rows of one's own have these, with all that
# else is asked
CURVES = ("s(x, k=4)[", "poly(z, 2)[")


@cache
def frames() -> dict[str, pd.DataFrame]:
    """Return 40 rows of each of four nodes."""
    rng = np.random.default_rng(0)
    parts = {}
    for name in NODES:
        x, sex = rng.normal(50.0, 9.0, 40), rng.choice(["f", "m"], 40)
        y = 0.1 * x + (sex == "m") + rng.normal(size=40)
        ward, z = rng.choice(["a", "b"], 40), rng.normal(2.0, 1.0, 40)
        parts[name] = pd.DataFrame({"x": x, "z": z, "sex": sex, "ward": ward, "y": y})
    return parts


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values inside a JSON value, itself first; of long lists some."""
    yield path
    inside = value.items() if isinstance(value, dict) else ()
    listed = list(enumerate(value)) if isinstance(value, list) else []
    for key, part in [*inside, *listed[:: max(1, len(listed) // 12)]]:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], lie: Any) -> Any:
    """Return a JSON value with a lie at a path."""
    if not path:
        return lie
    whole = copy.deepcopy(value)
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = lie
    return whole


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def is_plausible(honest: Any, path: tuple[Any, ...], lie: str) -> bool:
    """Return whether nobody can know of a lie: it is a word, or what other rows of one's own have."""
    truth = at(honest, path)
    is_curve = path[:2] == ("answer", "columns") and str(path[2:3])[2:].startswith(CURVES)
    is_curve |= (
        path[:2] == ("answer", "more") and len(at(honest, path[:2])) == 5 and path[2:] > (2,)
    )
    return isinstance(truth, str | list | dict) or LIES[lie] == truth or is_curve


@cache
def honest_answer(formula: str, client: str, content: bytes) -> Any:
    """Return what a node answers to a question about its schema, as JSON."""
    declared = FORMULAS[formula].declared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows far outside of the knots of others
        answer = own_answer(read_as(Question, content), declared, frames()[client], client)
    return {"client": client, "answer": json.loads(written(answer))}


class Agreeing:
    """Four nodes that agree on a schema, of which one lies in its answer to one of the questions."""

    def __init__(self, formula: str, asked: int = -1, path: Any = (), lie: Any = None) -> None:
        self.formula, self.asked, self.path, self.lie = formula, asked, path, lie
        self.honest: list[Any] = []

    def send(self, content: bytes) -> dict[str, bytes]:
        answers = {name: honest_answer(self.formula, name, content) for name in NODES}
        if len(self.honest) == self.asked:
            answers[LIAR] = replaced(answers[LIAR], self.path, self.lie)
        self.honest.append(honest_answer(self.formula, LIAR, content))
        return {name: json.dumps(answer).encode() for name, answer in answers.items()}

    def left_out(self) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return agreed_over(FORMULAS[self.formula], self.send)[1]


def schema_lies(formula: str) -> Iterator[tuple[int, tuple[Any, ...], str]]:
    """Yield questions, places in their answers and lies there; a spread of them unless all are asked for."""
    agreeing = Agreeing(formula)
    assert agreeing.left_out() == {}
    every = [
        (asked, path, lie)
        for asked, answer in enumerate(agreeing.honest)
        for path in places(answer)
        for lie in LIES
    ]
    yield from every if EVERY else islice(every, 0, None, max(1, len(every) // 40))


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_lie_about_a_schema_ends_no_agreement_and_is_not_silent(formula: str) -> None:
    silent = []
    for asked, path, lie in schema_lies(formula):
        agreeing = Agreeing(formula, asked, path, LIES[lie])
        left_out = agreeing.left_out()
        assert {*left_out} <= {LIAR}, (asked, path, lie, left_out)
        if not left_out and not is_plausible(agreeing.honest[asked], path, lie):
            silent.append((asked, path, lie))
    assert silent == []


@pytest.mark.parametrize("what", ["total", "squares", "count"])
@pytest.mark.parametrize("lie", ["0", "-7", "2 ** 40"])
def test_sums_of_one_column_must_agree_in_all_answers(what: str, lie: str) -> None:
    """They are possible by themselves, or not: an honest answer about the same column tells."""
    paths: dict[int, list[tuple[str, ...]]] = {
        0: [("answer", name, "sums", what) for name in ("x", "y")],
        3: [("answer", "sums", what)],
        4: [("answer", "columns", "scale(x)", what), ("answer", "response", what)],
    }
    for asked, of in paths.items():
        for path in of:
            agreeing = Agreeing("scale", asked, path, LIES[lie])
            assert [*agreeing.left_out()] == [LIAR], (asked, path)


HONEST = [
    ("y ~ scale(age) * arm + center(income) + rare", "gaussian"),
    ("hiv ~ age + scale(rare) + standardize(k)", "bernoulli"),
    ("y ~ poly(age, 3) + poly(heavy, 2) + I(age**2)", "gaussian"),
    ("y ~ s(age) + s(income, by=arm) + gp(age)", "gaussian"),
    ("y | weights(w) ~ bs(income, df=5) + scale(log(income))", "gaussian"),
    ("k ~ mo(grade) + C(grade):age + offset(log(w))", "poisson"),
    ("grade ~ big + scale(big) + S(ward) + (1 | ward)", "cumulative"),
]


@cache
def plain_rows(seed: int) -> pd.DataFrame:
    rng, n = np.random.default_rng(seed), 200
    return pd.DataFrame(
        {
            "y": rng.normal(size=n),
            "age": np.clip(rng.normal(60.0, 14.0, n).round(), 20.0, 99.0),
            "income": rng.lognormal(10.0, 1.0, n).round(),
            "big": 1e6 + rng.normal(size=n),
            "hiv": rng.integers(0, 2, n),
            "rare": (rng.uniform(size=n) < 0.03).astype(int),
            "heavy": rng.standard_t(1.5, n),
            "arm": rng.choice(["a", "b"], n),
            "ward": rng.choice(["u", "v", "w"], n, p=[0.6, 0.3, 0.1]),
            "grade": rng.choice([1, 2, 3], n),
            "k": rng.poisson(3.0, n),
            "w": rng.uniform(1.0, 2.0, n),
        }
    )


@pytest.mark.parametrize(("text", "family"), HONEST)
def test_no_honest_answer_is_taken_for_a_lie(text: str, family: Any) -> None:
    made = hierfl.formula(f"{text} + (1 | hospital)", family, clients="hospital")

    def send(content: bytes) -> dict[str, bytes]:
        question: Question = read_as(Question, content)
        answers = {}
        for seed, name in enumerate(NODES):
            answer = own_answer(question, made.declared, plain_rows(seed), name)
            answers[name] = written({"client": name, "answer": answer}).encode()
        return answers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert agreed_over(made, send)[1] == {}


# ------------------------------------------------------------ end to end
class Lying:
    """Four nodes in memory, of which one changes its answer to one request."""

    def __init__(self, folder: Path, kind: str, path: tuple[Any, ...] | None, lie: Any) -> None:
        self.stations = {
            name: station(FORMULA, {name: rows}, folder / name) for name, rows in frames().items()
        }
        self.kind, self.path, self.lie = kind, path, lie
        self.seen: dict[str, Any] = {}

    def ask(self, requests: Mapping[str, bytes]) -> Iterator[Answer]:
        for name, request in requests.items():
            answer = self.stations[name].answer(request)
            if name == LIAR:
                answer = self._lied(request, answer)
            yield Answer(name, answer)

    def _lied(self, request: bytes, answer: bytes) -> bytes:
        kind = read_request(request)[0]
        if kind not in ("schema", "introduce", "agree") or (kind == "schema" and kind in self.seen):
            return answer
        self.seen[kind] = json.loads(read_answer(request, answer))
        if kind != self.kind or self.path is None:
            return answer
        whole = replaced(self.seen[kind], self.path, self.lie)
        return write_answer(request, json.dumps(whole).encode())

    def fit(self) -> tuple[tuple[str, ...], str]:
        """Return the clients of the fit, and all that it says of those who are left out."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = hierfl.nodes.fit(FORMULA, over(self.ask, NODES), rounds=1, disclose="sums")
        return found.clients, " ".join(str(one.message) for one in said)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the liar answers where it does not lie."""
    fitted = Lying(tmp_path_factory.mktemp("honest"), "", None, None)
    assert fitted.fit()[0] == NODES
    return fitted.seen


@pytest.mark.parametrize("kind", ["schema", "introduce", "agree"])
def test_a_lie_ends_no_fit_and_is_not_silent(
    kind: str, honest: dict[str, Any], tmp_path: Path
) -> None:
    every = [(path, lie) for path in places(honest[kind]) for lie in LIES]
    some = len(every) if EVERY else 1
    for k, (path, lie) in enumerate(islice(every, 3, None, max(1, len(every) // some))):
        clients, words = Lying(tmp_path / str(k), kind, path, LIES[lie]).fit()
        assert {*clients} >= {*NODES} - {LIAR}, (path, lie)
        if LIAR in clients:
            assert is_plausible(honest[kind], path, lie), (path, lie)
        else:
            assert LIAR in words, (path, lie)
