"""Sums that a node has told by questions of different kinds, or of different columns, tell of no few rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.formulas.questions import Question
from hierfl.nodes.agreed_schema import answer_schema
from hierfl.nodes.describing import DescriptionRequest, answer_description
from hierfl.nodes.messages import NodeFailed
from hierfl.nodes.policy import Forbidden

N = 60


def rows() -> pd.DataFrame:
    """Columns equal to `before` in all rows but one: `after`, where it is there `lacks`, and in size `sign`."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(N, 2)), columns=["y", "z"])
    frame["before"] = rng.normal(80.0, 12.0, N).round(1)
    for name, value in (("after", 87.5), ("lacks", np.nan), ("sign", 91.3)):
        frame[name] = np.where(np.arange(N) == 17, value, frame["before"])
    frame["sign"] *= rng.choice([-1.0, 1.0], N)
    frame["arm"] = rng.permutation(np.repeat(["a", "b"], N // 2))
    frame["other"] = rng.permutation(frame["before"])
    return frame


def asked(kind: str, text: str, folder: Path, call: str = "") -> Any:
    """Ask a node by one kind of question alone; a hostile server makes up a schema that is plausible."""
    made = hierfl.formula(f"{text} + (1 | h)", "gaussian", clients="h", missing="drop")
    schema, own = None, {"north": rows()}
    if kind in ("call", "design"):
        schema = replace(hierfl.schema(own, made, min_count=5), design={}, response=None)
        schema = schema if kind == "design" else replace(schema, transforms={})
    question = Question(kind, 5, text=call, schema=schema)  # type: ignore[arg-type]
    return json.loads(answer_schema(made, own, folder, question.json().encode()))["answer"]


def columns(name: str, response: str = "y") -> Callable[[Path], Any]:
    return lambda folder: asked("columns", f"{response} ~ {name}", folder)[name]["sums"]


def call(name: str) -> Callable[[Path], Any]:
    return lambda folder: asked("call", f"z ~ scale({name})", folder, f"scale({name})")


def design(name: str) -> Callable[[Path], Any]:
    return lambda folder: asked("design", f"z ~ {name}", folder)["columns"][name]


def table(*names: str, by: str = "") -> Callable[[Path], Any]:
    def described(folder: Path) -> Any:
        terms = " + ".join(filter(None, [*names, by]))
        made = hierfl.formula(f"y ~ {terms} + (1 | h)", "gaussian", clients="h")
        request = DescriptionRequest("table", 5, by, names).content()
        return json.loads(answer_description(made, {"north": rows()}, folder, request))["answer"]

    return described


# a question about a column, and one about another
PAIRS: dict[str, tuple[Callable[[Path], Any], Callable[[str], Callable[[Path], Any]], str]] = {
    "columns and design": (columns("before"), design, "after"),
    "columns and a call": (columns("before"), call, "after"),
    "two calls": (
        call("before"),
        lambda of: lambda f: asked("call", f"y ~ scale({of})", f, f"scale({of})"),
        "after",
    ),
    "a call and a design": (call("before"), design, "after"),
    "a design and columns": (design("before"), columns, "after"),
    "squares": (columns("before"), columns, "sign"),
    "squares and a design": (columns("before"), design, "sign"),
    "a row that lacks one": (columns("before", "z"), columns, "lacks"),
    "a table and columns": (table("before"), columns, "after"),
    "columns and a table": (columns("before"), table, "after"),
    "a table by arm and columns": (table("before", by="arm"), columns, "after"),
    "a table and a row that lacks one": (table("before"), columns, "lacks"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_answers_of_different_kinds_do_not_differ_by_few_rows(name: str, tmp_path: Path) -> None:
    """The difference of two sums, or of two sums of squares, would be one patient's."""
    first, second, column = PAIRS[name]
    for of in ("few", "many"):
        (tmp_path / of).mkdir()
        (tmp_path / of / "policy.toml").write_text('may_leave = ["descriptions"]\n')
        assert first(tmp_path / of)
    with pytest.raises(Forbidden, match="with earlier answers about these rows"):
        second(column)(tmp_path / "few")
    assert second("other")(tmp_path / "many")


CHANGES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "a new row": lambda of: pd.concat([of, of[:1] + 1.0], ignore_index=True),
    "a row less": lambda of: of.drop(index=17).reset_index(drop=True),
    "a row less in another order": lambda of: of.drop(index=17).sort_values("z", ignore_index=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_columns_that_are_the_same_do_not_tell_of_few_rows_that_changed(
    name: str, tmp_path: Path
) -> None:
    """The sum of ages, and later that of ages at the visit, which are the same, differ by the new patient's."""
    question = Question("columns", 5).json().encode()
    before = rows().assign(after=lambda of: of.before).drop(columns=["lacks", "arm"])
    many = pd.concat([before, before[:6] + 1.0], ignore_index=True)

    def told(text: str, frame: pd.DataFrame, folder: str) -> bytes:
        made = hierfl.formula(f"{text} + (1 | h)", "gaussian", clients="h")
        return answer_schema(made, {"north": frame}, tmp_path / folder, question)

    for folder in ("few", "many"):
        told("y ~ before", before, folder)
    with pytest.raises(Forbidden, match="with earlier answers about these rows"):
        told("z ~ after", CHANGES[name](before), "few")
    assert told("z ~ after", many, "many")


def test_a_table_of_columns_that_differ_in_one_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('may_leave = ["descriptions"]\n')
    with pytest.raises(Forbidden, match="a combination of its columns singles out fewer than 5"):
        table("before", "after")(tmp_path)
    assert table("before", "other")(tmp_path)


def test_power_sums_are_fewer_than_the_rows(tmp_path: Path) -> None:
    """By Newton's identities, as many power sums as there are rows give the value of each."""
    made = hierfl.formula("y ~ poly(x, 3) + (1 | h)", "gaussian", clients="h")
    for count in (9, 12):
        x = np.random.default_rng(1).permutation(np.linspace(-1.0, 1.0, count))
        own = pd.DataFrame({"x": x, "y": x[::-1]})
        south = pd.DataFrame({"x": np.linspace(-1.2, 1.2, 99), "y": np.arange(99.0)})
        schema = hierfl.schema({"north": own, "south": south}, made)
        (constants,) = schema.transforms.values()
        before = replace(schema, transforms={}, design={}, response=None, min_count=5)
        at = constants.mean, constants.sd
        question = Question("call", 5, text="poly(x, 3)", at=at, schema=before).json().encode()
        if count == 12:
            assert answer_schema(made, {"north": own}, tmp_path / "12", question)
            continue
        with pytest.raises(Forbidden, match="sums of the powers"):
            answer_schema(made, {"north": own}, tmp_path / "9", question)


@pytest.mark.parametrize("term", ["log(x)", "scale(log(x))"])
def test_a_term_that_is_not_finite_is_named_and_its_row_is_not(term: str, tmp_path: Path) -> None:
    frame = rows().assign(x=lambda of: of.before.where(of.index != 17, 0.0))
    made = hierfl.formula(f"y ~ {term} + (1 | h)", "gaussian", clients="h")
    usual = {f"{k}": frame.assign(x=k * frame["before"]) for k in (1.0, 3.0)}
    schema = replace(hierfl.schema(usual, made, min_count=5), design={}, response=None)
    question = Question("design", 5, schema=schema)
    if term == "scale(log(x))":
        question = Question("call", 5, text=term, schema=replace(schema, transforms={}))
    with pytest.raises(NodeFailed) as error:
        answer_schema(made, {"north": frame}, tmp_path, question.json().encode())
    assert f"'{term}' is not finite in some row" in str(error.value) and "17" not in str(
        error.value
    )
