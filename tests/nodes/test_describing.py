"""Table 1 and times over nodes: as of frames, under policies, once, and whatever a node or a server says."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import hierfl
from hierfl.cli.officer_page import entries
from hierfl.nodes import Answer, TooFewNodes, in_process, over, station
from hierfl.nodes.account import Ledger, answer_questions_again
from hierfl.nodes.describing import DescriptionRequest, answer_description
from hierfl.nodes.envelope import read_answer, write_answer
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden
from tests.effects.test_kaplan_meier import late, made

TEXT = "time | event(status) ~ arm + age + (1 | site)"
LETS = 'may_leave = ["descriptions"]\n'


def formula() -> hierfl.Formula:
    return hierfl.formula(TEXT, "weibull", clients="site", missing="drop")


def frames() -> dict[str, pd.DataFrame]:
    whole = made(600)
    whole["age"] = 40.0 + whole["time"].rank() % 31
    return {str(site): part.drop(columns="site") for site, part in whole.groupby("site")}


def letting(folder: Path, text: str = LETS) -> Path:
    """Write a policy for each node, and return the folder."""
    for name in frames():
        (folder / name).mkdir(parents=True)
        (folder / name / "policy.toml").write_text(text)
    return folder


def test_nodes_describe_their_rows_as_frames_do(tmp_path: Path) -> None:
    nodes = in_process(frames(), letting(tmp_path))
    found = hierfl.describe(nodes, formula(), by="arm")
    here = hierfl.describe(frames(), formula(), by="arm", least_count=5)
    pd.testing.assert_frame_equal(found.frame, here.frame)
    pd.testing.assert_frame_equal(found.table, here.table)
    curves = hierfl.kaplan_meier(nodes, formula(), by="arm")
    same = hierfl.kaplan_meier(frames(), formula(), by="arm", least_count=5)
    pd.testing.assert_frame_equal(curves.frame, same.frame)
    pd.testing.assert_frame_equal(curves.tests, same.tests)
    assert hierfl.describe(nodes, formula(), by="arm").note == found.note  # the same question


def test_nodes_tell_late_entries_and_leave_out_words(tmp_path: Path) -> None:
    whole = late(600).drop(columns="w")
    text = "time | event(status) + entry(start) ~ arm + (1 | site)"
    of = hierfl.formula(text, "weibull", clients="site")
    parts = {str(site): part.drop(columns="site") for site, part in whole.groupby("site")}
    curves = hierfl.kaplan_meier(in_process(parts, letting(tmp_path / "1")), of, by="arm")
    same = hierfl.kaplan_meier(parts, of, by="arm", least_count=5)
    pd.testing.assert_frame_equal(curves.frame, same.frame)
    assert (curves.frame["time"] == 0.0).any() and curves.frame["at_risk"].iloc[1] < len(whole)
    parts["a"] = parts["a"].assign(status="yes")
    with pytest.warns(UserWarning, match="'a' is left out"):
        found = hierfl.kaplan_meier(in_process(parts, letting(tmp_path / "2")), of)
    assert [*found.left_out] == ["a"] and "yes" not in str(found.left_out)


def test_nothing_leaves_unless_the_policy_allows_descriptions(tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="lets no descriptions leave"):
        hierfl.describe(in_process(frames(), tmp_path), formula())
    assert not Ledger.at(tmp_path / "a").entries
    (tmp_path / "b" / "policy.toml").write_text(LETS)
    with pytest.warns(UserWarning, match="'[ac]' is left out: the node's policy lets no"):
        found = hierfl.describe(in_process(frames(), tmp_path), formula(), by="site")
    assert set(found.left_out) == {"a", "c"} and list(found.table.columns) == ["b", "all"]
    assert "Client 'a' is not included" in found.note


def ask(folder: Path, question: DescriptionRequest, rows: Any = None) -> Any:
    parts = {"a": frames()["a"]} if rows is None else rows
    return json.loads(answer_description(formula(), parts, folder, question.content()))


TABLE = DescriptionRequest("table", 5, "", ("age", "arm"))


def test_a_node_answers_once(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(LETS)
    first = ask(tmp_path, TABLE)
    fewer = {"a": frames()["a"].iloc[1:]}
    assert ask(tmp_path, TABLE) == first == ask(tmp_path, TABLE, fewer)  # not of other rows
    for other in (
        DescriptionRequest("table", 6, "", ("age", "arm")),
        DescriptionRequest("table", 5, "arm", ("age",)),
    ):
        with pytest.raises(Refused, match="a node answers once"):
            ask(tmp_path, other)
    times = DescriptionRequest("times", 5, "arm")
    assert ask(tmp_path, times) == ask(tmp_path, times)
    later = hierfl.formula("age | event(status) ~ arm + (1 | site)", "weibull", clients="site")
    for of, other in ((formula(), DescriptionRequest("times", 5, "")), (later, times)):
        with pytest.raises(Refused, match="a node answers once"):  # and not of other times
            answer_description(of, {"a": frames()["a"]}, tmp_path, other.content())
    answer_questions_again(tmp_path)  # by the owner
    with pytest.raises(Forbidden, match="fewer than 5 rows have changed"):
        ask(tmp_path, TABLE, fewer)
    assert ask(tmp_path, TABLE, {"a": frames()["a"].iloc[5:]}) != first


QUESTIONS: dict[str, tuple[DescriptionRequest, str, str]] = {
    "another column": (
        DescriptionRequest("table", 5, "", ("name",)),
        LETS,
        "reads name, which the formula",
    ),
    "another group": (
        DescriptionRequest("table", 5, "name", ("age",)),
        LETS,
        "reads name, which the",
    ),
    "groups of times": (
        DescriptionRequest("times", 5, "name"),
        LETS,
        "reads name, which the formula",
    ),
    "few rows": (
        DescriptionRequest("table", 4, "", ("age",)),
        LETS,
        "needs 5 rows for each number",
    ),
    "one row": (
        DescriptionRequest("table", 1, "", ("age",)),
        LETS + "min_count = 1\n",
        "not a request of the kind",
    ),
    "twice": (DescriptionRequest("table", 5, "", ("age", "age")), LETS, "a column twice"),
    "a budget": (TABLE, LETS + "epsilon = 1.0\ndelta = 1e-5\n", "has a budget for each row"),
    "nothing at all": (TABLE, LETS + "methods = []\n", "allows no method"),
    "a few patients": (TABLE, LETS + "min_rows = 10000\n", "asks for 10000 rows"),
    "an owner who asks": (TABLE, LETS + 'approve = "ask"\n', "waits for the approval"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_about_rows_that_a_node_refuses(name: str, tmp_path: Path) -> None:
    question, policy, words = QUESTIONS[name]
    (tmp_path / "policy.toml").write_text(policy)
    rows = {"a": frames()["a"].assign(name=[f"patient {k}" for k in range(len(frames()["a"]))])}
    with pytest.raises(Refused, match=words):
        ask(tmp_path, question, rows)
    assert not Ledger.at(tmp_path).entries


@pytest.mark.parametrize("content", [b"", b"[]", b'{"kind": "table"}', b'{"kind": "rows", "least": 5, '
    b'"by": "", "columns": []}', b'{"kind": "table", "least": 5, "by": "", "columns": "age"}'])  # fmt: skip
def test_what_is_no_question_about_rows(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(LETS)
    with pytest.raises(Refused):
        answer_description(formula(), {"a": frames()["a"]}, tmp_path, content)


def test_descriptions_are_logged_and_hold_no_row(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(LETS)
    rows = frames()["a"]
    ask(tmp_path, TABLE), ask(tmp_path, DescriptionRequest("times", 5, "arm"))
    found = [one for one in entries(tmp_path) if one["what"] == "description"]
    assert len(found) == 2 and found[0]["question"]["columns"] == ["age", "arm"]
    said = json.loads(found[1]["text"])["answer"]["groups"]
    for arm, part in rows.groupby("arm"):
        assert said[arm]["ends"][-1] < part["time"].max() and said[arm]["rows"] == len(part)
    assert all(one["rows"] == len(rows) for one in found)


def test_an_error_about_rows_holds_no_value(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(LETS)
    rows = {"a": frames()["a"].assign(age=["secret 17"] * 3 + [1.0] * (len(frames()["a"]) - 3))}
    words = "column 'age' is neither all numbers nor all strings"
    with pytest.raises(Exception, match=words) as error:
        ask(tmp_path, TABLE, rows)
    assert "secret" not in str(error.value) and "17" not in str(error.value)


def lying(folder: Path, change: Any) -> Any:
    """Return nodes of which `c` changes what it tells."""
    parts = frames()
    stations: dict[str, Any] = {
        name: station(formula(), {name: part}, letting_one(folder / name))
        for name, part in parts.items()
    }
    honest = stations["c"]

    def lie(request: bytes) -> bytes:
        said = json.loads(read_answer(request, honest.answer(request)))
        return write_answer(request, json.dumps(change(said)).encode())

    stations["c"] = SimpleNamespace(answer=lie)

    def asked(requests: Any) -> Iterator[Answer]:
        for name, request in requests.items():
            yield Answer(name, stations[name].answer(request))

    return over(asked, parts)


def letting_one(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text(LETS)
    return folder


def with_age(**other: Any) -> Any:
    def change(said: Any) -> Any:
        said["answer"]["groups"][""]["age"]["numbers"].update(other)
        return said

    return change


LIES: dict[str, tuple[Any, str]] = {  # the reader's own are in test_lies.py
    "another's name": (lambda said: said | {"client": "a"}, "introduces client 'a', and so does a"),
    "far values": (with_age(mean=1e12, sd=1e12), "times those of most others"),
    "names": (lambda said: _as_names(said), "is 'of names', and 'of numbers' at most"),
    "groups": (lambda said: _in_groups(said), "groups that were not asked for"),
}


def _as_names(said: Any) -> Any:
    rows = said["answer"]["rows"][""]
    levels = {"rows": rows, "counts": {"old": rows}, "others": 0, "declared": []}
    said["answer"]["groups"][""]["age"] = {"missing": 0, "numbers": None, "levels": levels}
    return said


def _in_groups(said: Any) -> Any:
    answer = said["answer"]
    for of in ("rows", "groups"):
        answer[of] = {"<script>": answer[of][""]}
    return said


@pytest.mark.parametrize("name", LIES)
def test_a_node_that_lies_is_left_out_and_named(name: str, tmp_path: Path) -> None:
    change, why = LIES[name]
    nodes, honest = lying(tmp_path, change), frames()
    with pytest.warns(UserWarning, match=f"is left out: .*({why})"):
        found = hierfl.describe(nodes, formula(), columns=["age"])
    here = {k: v for k, v in honest.items() if k != "c"}
    assert set(found.left_out) == {"c"}
    want = hierfl.describe(here, formula(), columns=["age"], least_count=5)
    pd.testing.assert_frame_equal(found.frame, want.frame)


def test_too_few_nodes_are_refused(tmp_path: Path) -> None:
    parts = frames()
    for name in ("a", "b"):
        letting_one(tmp_path / name)
    with pytest.raises(TooFewNodes, match="2 nodes describe their rows, and 3 are needed"):
        hierfl.describe(in_process(parts, tmp_path, fewest=3), formula())
    with pytest.raises(TypeError, match=r"give the one whose columns nodes describe"):
        hierfl.describe(in_process(parts, tmp_path))


def test_nodes_without_frames_are_refused(tmp_path: Path) -> None:
    rows = hierfl.ClientData.from_clients({"a": {"x": [1.0], "y": [1.0]}})
    one = station(hierfl.models.regression("gaussian"), rows, letting_one(tmp_path))
    with pytest.raises(Refused, match="no formula and frames"):
        one.reply("describe", TABLE.content())
