"""One node of four lies in a field of an answer before the rounds: no run ends, and no lie is silent.

Answers are judged where the server reads them, and honest ones are computed once; one fit goes end to end.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from itertools import islice, product
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.core.typed_json import read_as, written
from hierfl.formulas.credible import Heard
from hierfl.formulas.questions import Question, own_answer
from hierfl.formulas.read_rows import ReadRows
from hierfl.nodes import Answer, Reached
from hierfl.nodes.agreed_schema import agreed_over
from hierfl.nodes.agreement import Agreement, Introduction, whose_codes_run
from hierfl.nodes.choosing import FitCall, decided
from tests.nodes.lies import JSON_LIES, at, places, replaced

LIAR, NODES = "north", ("east", "north", "south", "west")
FORMULAS = {
    "scale": hierfl.formula("y ~ scale(x) + sex + (1 | hospital)", "gaussian", clients="hospital"),
    "curves": hierfl.formula(
        "y ~ s(x, k=4) + poly(z, 2) + sex + (1 | ward) + (1 | hospital)", clients="hospital"
    ),
}
FORMULA = FORMULAS["scale"]
EVERY = bool(os.environ.get("HIERFL_SLOW"))
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


def is_plausible(honest: Any, path: tuple[Any, ...], lie: str) -> bool:
    """Return whether nobody can know of a lie: it is a word, or what other rows of one's own have."""
    truth = at(honest, path)
    if lie in ("nothing", "one too many"):  # of levels, of which some are rare
        return path[-2:-1] in (("counts",), ("declared",), ("constant",))
    is_curve = path[:2] == ("answer", "columns") and str(path[2:3])[2:].startswith(CURVES)
    is_curve &= lie in ("0", "-7")
    is_power = path[:2] == ("answer", "more") and len(at(honest, path[:2])) == 5
    is_curve |= is_power and path[2:] > (2,) and lie in ("0", "-7")
    return isinstance(truth, str | list | dict) or JSON_LIES[lie] == truth or is_curve


@cache
def honest_answer(formula: str, client: str, content: bytes) -> Any:
    """Return what a node answers to a question about its schema, as JSON."""
    declared = FORMULAS[formula].declared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows far outside of the knots of others
        question: Question = read_as(Question, content)
        rows = ReadRows(declared, frames()[client], client, question.min_count)
        answer = own_answer(question, rows)
    return {"client": client, "answer": json.loads(written(answer))}


class Agreeing:
    """Four nodes that agree on a schema, of which one lies in its answer to one of the questions."""

    def __init__(self, formula: str, asked: int = -1, path: Any = (), lie: str = "") -> None:
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
        for lie in JSON_LIES
    ]
    yield from every if EVERY else islice(every, 0, None, max(1, len(every) // 40))


@pytest.mark.slow("curves")
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_lie_about_a_schema_ends_no_agreement_and_is_not_silent(formula: str) -> None:
    silent = []
    for asked, path, lie in schema_lies(formula):
        agreeing = Agreeing(formula, asked, path, lie)
        left_out = agreeing.left_out()
        assert {*left_out} <= {LIAR}, (asked, path, lie, left_out)
        if not left_out and not is_plausible(agreeing.honest[asked], path, lie):
            silent.append((asked, path, lie))
    assert silent == []


@pytest.mark.parametrize("content", [None, b"\xff\x00", b"[" * 100_000])
def test_what_is_no_answer_ends_no_agreement(content: bytes | None) -> None:
    agreeing = Agreeing("scale")

    def send(question: bytes) -> dict[str, bytes]:
        answers = agreeing.send(question)
        own = {} if content is None else {LIAR: content}
        return {**{name: of for name, of in answers.items() if name != LIAR}, **own}

    assert [*agreed_over(FORMULA, send)[1]] == ([] if content is None else [LIAR])


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
            agreeing = Agreeing("scale", asked, path, lie)
            assert [*agreeing.left_out()] == [LIAR], (asked, path)


def test_squares_of_each_transform_are_bounded_by_its_basis() -> None:
    """By what its columns are of any values that the client can have; honest sums are below."""
    text = (
        "y ~ s(age, k=5) + poly(income, 3) + bs(age, df=5) + gp(income) + s(age, by=w) + ward:age"
    )
    made = hierfl.formula(f"{text} + poly(age, 2):income + (1 | hospital)", clients="hospital")
    heard, told = Heard(), list[tuple[Question, Any]]()

    def send(content: bytes) -> dict[str, bytes]:
        question: Question = read_as(Question, content)
        rows = ReadRows(made.declared, plain_rows(0), "north", question.min_count)
        answer = own_answer(question, rows)
        heard.check(question, answer, made.declared)
        told.append((question, answer))
        return {"north": written({"client": "north", "answer": answer}).encode()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert agreed_over(made, send)[1] == {}
        question, answer = told[-1]
        for name, sums in ((n, of) for n, of in answer.columns.items() if of.count):
            squares = 2.0**80 if "income" in name else 2.0**40
            lie = replace(answer, columns={**answer.columns, name: replace(sums, squares=squares)})
            with pytest.raises(ValueError, match=r"squares|another number of rows|differ"):
                heard.check(question, lie, made.declared)


HONEST = [
    ("y ~ scale(age) * arm + center(income) + rare", "gaussian"),
    ("hiv ~ age + scale(rare) + standardize(k)", "bernoulli"),
    ("y ~ poly(age, 3) + poly(heavy, 2) + I(age**2)", "gaussian"),
    ("y ~ s(age) + s(income, by=arm) + gp(age)", "gaussian"),
    ("y | weights(w) ~ bs(income, df=5) + scale(log(income))", "gaussian"),
    ("k ~ mo(grade) + C(grade):age + offset(log(w))", "poisson"),
    ("y ~ age + offset(income) + offset(log(big))", "gaussian"),
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
            rows = ReadRows(made.declared, plain_rows(seed), name, question.min_count)
            answer = own_answer(question, rows)
            answers[name] = written({"client": name, "answer": answer}).encode()
        return answers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert agreed_over(made, send)[1] == {}


class Introducing:
    """What four nodes report of a formula with a schema, and what a server makes of it."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.formula = agreed_over(FORMULA, Agreeing("scale").send)[0]
        self.call = FitCall(self.formula, disclose="sums")
        parts = {name: self.formula.data({name: rows}) for name, rows in frames().items()}
        self.honest = {n: asdict(Introduction.of(data)) for n, data in parts.items()}
        self.decided = cache(lambda agreement: decided(self.call, self.agreements[agreement]))
        self.agreements: dict[str, Agreement] = {}

    def left_out(self, path: tuple[Any, ...], lie: str) -> dict[str, str]:
        answers = {**self.honest, LIAR: replaced(self.honest[LIAR], path, lie)}
        introduced, left_out = reached(answers)._introductions(NODES, b"", {})
        agreement, differ = whose_codes_run(self.call.model, list(introduced.values()))
        self.agreements[agreement.digest] = agreement
        assert self.decided(agreement.digest).method.name  # a method is chosen
        return left_out | differ


def reached(answers: Mapping[str, Any]) -> Reached:
    """Return nodes that give these answers, whatever they are asked."""
    return Reached(
        lambda kind, contents: [Answer(n, json.dumps(answers[n]).encode()) for n in contents], NODES
    )


def test_a_lie_of_an_introduction_ends_no_run_and_is_not_silent() -> None:
    introducing = Introducing()
    honest, silent = introducing.honest[LIAR], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(product(places(json.loads(json.dumps(honest))), JSON_LIES))
        for path, lie in every[:: 1 if EVERY else 3]:
            left_out = introducing.left_out(path, lie)
            assert {*left_out} <= {LIAR}, (path, lie, left_out)
            is_name = path == ("client",) and lie == "a text"
            is_level = "levels" in path and len(path) > 2
            is_true = JSON_LIES[lie] == at(honest, path)
            if not (left_out or is_true or is_name or is_level):
                silent.append((path, lie))
    assert silent == []


@pytest.mark.parametrize("lie", [{"rows": 41}, {"rows": 4000}, {"client": "another"}])
def test_an_introduction_is_of_the_client_and_rows_of_the_schema(lie: Mapping[str, Any]) -> None:
    introducing = Introducing()
    answers = {**introducing.honest, LIAR: {**introducing.honest[LIAR], **lie}}
    told = agreed_over(FORMULA, Agreeing("scale").send).clients
    assert told == {name: (name, 40) for name in NODES}
    with pytest.warns(UserWarning, match="node north is left out|client 'north' is left out"):
        introduced, left_out = reached(answers)._introductions(NODES, b"", told)
    assert [*left_out] == [LIAR] and "after answers of 'north' with 40" in left_out[LIAR]
    assert introduced.keys() == {*NODES} - {LIAR}


def test_a_lie_of_a_start_ends_no_run_and_is_not_silent() -> None:
    """The name in it is not read: the server knows whom it has asked."""
    honest = {name: {"run": "r", "client": name, "start": "s"} for name in NODES}
    for path in places(honest[LIAR]):
        for lie in JSON_LIES:
            answers = {**honest, LIAR: replaced(honest[LIAR], path, lie)}
            starts, others = reached(answers)._agree({}, {name: name for name in NODES}, "r")
            differ = {name for name, start in starts.items() if start != "s"}
            left_out = {*others} | differ
            is_read = path != ("client",) and lie != "one too many"
            assert left_out == {LIAR} or not (left_out or is_read), (path, lie)


def test_a_liar_that_is_known_late_is_said_to_be_in_what_was_agreed_on() -> None:
    path = ("answer", "sums", "total")
    agreeing = Agreeing("scale", 3, path, "-7")
    assert "what all have agreed on before" in agreeing.left_out()[LIAR]
    early = Agreeing("scale", 0, ("answer", "x", "sums", "total"), "nan").left_out()[LIAR]
    assert "what all have agreed on before" not in early
