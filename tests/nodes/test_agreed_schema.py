"""A formula over nodes: the nodes agree on its schema first, by counts and sums that are logged."""

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.formulas.questions import Question
from hierfl.nodes import in_process, station
from hierfl.nodes.agreed_schema import agreed_over, answer_schema, with_schema
from hierfl.nodes.messages import NodeFailed, Refused
from hierfl.nodes.policy import Forbidden
from tests.flower.test_apps import identity
from tests.formulas.frames import patients
from tests.formulas.test_left_side import rows
from tests.nodes.lies import at, places
from tests.programs import assert_close
from tests.sampled import sampled

__all__ = ["identity"]  # a fixture of every test here

TEXT = "y ~ scale(age) + sex + bs(dose, df=4) + poly(age, 2) + (1 + age | site) + (1 | region)"


def made(text: str = TEXT) -> hierfl.Formula:
    return hierfl.formula(text, clients="site")


def frames(rows: int = 60) -> dict[str, pd.DataFrame]:
    """Return the rows of four sites of three regions."""
    whole = patients(rows=rows)
    return {name: whole[whole["site"] == name] for name in ("s0", "s3", "s6", "s7")}


def asked_of(
    parts: dict[str, pd.DataFrame], folder: Path, formula: hierfl.Formula | None = None
) -> Any:
    """Return a function that asks nodes of this process."""
    own = formula or made()

    def send(content: bytes) -> dict[str, bytes]:
        return {n: answer_schema(own, {n: f}, folder / n, content) for n, f in parts.items()}

    return send


@pytest.mark.slow
def test_nodes_agree_on_the_schema_of_frames_that_are_together(tmp_path: Path) -> None:
    parts = frames()
    found = agreed_over(made(), asked_of(parts, tmp_path))[0].agreed
    assert found == hierfl.schema(parts, made(), min_count=5)
    assert with_schema(made(), found.json()).agreed == found
    columns = hierfl.schema(parts, clients="site")  # of columns alone, to begin with
    start = hierfl.formula(TEXT, clients="site", schema=columns)
    later = agreed_over(start, asked_of(parts, tmp_path / "later", start))[0].agreed
    assert later.design == found.design and set(later.columns) > set(found.columns)


RESPONSES = {
    "y ~ scale(age) + sex + (1 | site)": "gaussian",
    "cbind(wins, lost, visits) | trials(all) ~ age + (1 | site)": "multinomial",
    "cbind(most, part, rest) ~ age + (1 | site)": "dirichlet",
    "some | trunc(lb=1) ~ age + (1 | site)": "poisson",
    "grade ~ cs(dose) + (1 | site)": "sratio",
}


@pytest.mark.filterwarnings("ignore:k-hat", "ignore:the rounds ended")  # of two rounds
@pytest.mark.parametrize("text", sampled(RESPONSES, [*RESPONSES][:1]))
def test_a_fit_over_nodes_is_the_fit_of_the_frames(tmp_path: Path, text: str) -> None:
    """The server reads a program without rows, of which no sum or bound holds."""
    enough = pd.concat([rows()] * 3, ignore_index=True)  # of each level at each site
    parts = {str(site): part for site, part in enough.groupby("site")}
    formula = hierfl.formula(text, RESPONSES[text], clients="site")
    over = hierfl.nodes.fit(formula, in_process(parts, tmp_path), rounds=2, disclose="sums")
    ready = formula.on(parts, min_count=5)
    settings = hierfl.Settings(compile=False)
    here = hierfl.fit(over.method, ready.data(parts), rounds=2, progress=False, settings=settings)
    assert_close(over.message, here.message)


@pytest.mark.filterwarnings("ignore:k-hat", "ignore:the rounds ended")  # of two rounds
def test_made_up_rows_need_no_curvature(tmp_path: Path) -> None:
    """The server reads shapes alone off rows of zeros, where a Gamma's density has no derivative."""
    parts = {k: part.assign(y=np.exp(0.3 * part["y"])) for k, part in frames().items()}
    formula = hierfl.formula("y ~ scale(age) + (1 | site)", "gamma", clients="site")
    over = hierfl.nodes.fit(formula, in_process(parts, tmp_path), rounds=2)
    assert (over.chosen or "").startswith("two_stage") and len(over.history) == 2


@pytest.mark.slow
def test_columns_above_the_clients_over_nodes(tmp_path: Path) -> None:
    """Nodes and server start from the prior of the same made-up client, whatever the fields of their own."""
    text = "y ~ beds + (1 | site)"
    parts = {str(site): part for site, part in patients(rows=20).groupby("site")}
    over = hierfl.nodes.fit(made(text), in_process(parts, tmp_path))
    assert (over.chosen or "").startswith("two_stage")
    assert over.history["k_hat"].iloc[-1] < 0.7 and over.history["effective"].iloc[-1] > 1000
    whole = pd.concat(parts.values())
    slope = np.polyfit(whole["beds"], whole["y"], 1)[0]
    drawn: Any = over.posterior(2000)
    beds = drawn.posterior["beds"].values
    assert abs(beds.mean() - slope) < beds.std()  # the slope of all rows together, nearly


def test_answers_are_logged_and_hold_no_row(tmp_path: Path) -> None:
    parts = frames()
    agreed_over(made(), asked_of(parts, tmp_path))
    name = next(iter(parts))
    lines = [json.loads(line) for line in (tmp_path / name / "left.jsonl").read_text().splitlines()]
    assert len(lines) == 10 and {line["what"] for line in lines} == {"schema"}
    text = json.dumps(lines)
    for column in ("age", "dose", "y"):
        assert not [value for value in parts[name][column] if repr(float(value)) in text]


def test_questions_that_a_node_refuses(tmp_path: Path) -> None:
    parts = frames()
    name, frame = next(iter(parts.items()))
    schema = hierfl.schema(parts, made(), min_count=5)
    (tmp_path / "policy.toml").write_text("min_count = 6\n")

    def ask(question: Question | bytes, rows: Any = None) -> bytes:
        content = question if isinstance(question, bytes) else question.json().encode()
        return answer_schema(made(), {name: frame} if rows is None else rows, tmp_path, content)

    with pytest.raises(
        Forbidden,
        match=r"fewer than 6 rows .min_count., and the server asks for those of 5: min_count = 5 would",
    ):
        ask(Question("columns", 5))
    with pytest.raises(Forbidden, match="fewer than 6 rows"):
        ask(Question("call", 9, text="bs(dose, df=4)", at=(0.0, 1.0), schema=schema))
    assert json.loads(ask(Question("rows"))) == {"client": name, "answer": len(frame)}
    with pytest.raises(ValueError, match="reads secret, which the formula does not"):
        ask(Question("groups", 6, by=("secret",)))
    with pytest.raises(ValueError, match=r"has no transform 'scale\(secret\)'"):
        ask(Question("call", 6, text="scale(secret)", schema=replace(schema, min_count=6)))
    for wrong in (b"", b"[]", b"{}", b'{"kind": "rows"}', Question("rows", 0).json().encode()):
        with pytest.raises(Refused, match=r"not a request of|no node answers|not JSON"):
            ask(wrong)
    with pytest.raises(ValueError, match="names several: start a node for each"):
        ask(Question("rows"), {"one": frame, "two": frame})
    with pytest.raises(Refused, match="this node's formula is another"):
        with_schema(made("y ~ age"), schema.json())


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b'{"client": "s0"}',
        b'{"client": "s0", "answer": true}',
        b'{"client": "s0", "answer": {"age": {"kind": "number"}}}',
        b'{"client": "s0", "answer": {"age": {"kind": "number", "unit": "", "counts": null, "declared": [], '
        b'"sums": {"count": 3, "total": Infinity, "squares": 1.0}}}}',
        b'{"client": "s0", "answer": {"sex": {"kind": "category", "unit": "", "counts": {"f": -1}, "declared": [], '
        b'"sums": null}}}',
    ],
)
def test_answers_that_a_server_refuses(answer: bytes) -> None:
    with pytest.raises(
        ValueError, match=r"it answers without|it is not an answer to|it is not JSON"
    ):
        agreed_over(made(), lambda content: {"s0": answer})


def test_clients_that_answer_twice_or_not_always(tmp_path: Path) -> None:
    parts, count, short = frames(), 0, made("y ~ scale(age) + sex + (1 | site)")
    send = asked_of(parts, tmp_path, short)

    def twice(content: bytes) -> dict[str, bytes]:
        found = send(content)
        return {**found, "another": next(iter(found.values()))}

    def lossy(content: bytes) -> dict[str, bytes]:
        nonlocal count
        count += 1
        return dict(list(send(content).items())[: None if count == 1 else -1])

    *_, last = parts
    assert agreed_over(short, twice)[1].keys() == {"another"}
    send = asked_of(parts, tmp_path / "again", short)
    left_out = agreed_over(short, lossy)[1]
    assert [*left_out] == [last] and left_out[last].startswith("it did not answer all questions")


def strings(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every string in a JSON object, of keys with the mark "a key"."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield (*path, key, "a key")
            yield from strings(value, (*path, key))
    elif isinstance(found, list):
        for place, value in enumerate(found):
            yield from strings(value, (*path, place))
    elif isinstance(found, str):
        yield path


def with_another(whole: Any, path: tuple[Any, ...], text: Any) -> Any:
    """Return a copy of a JSON object with another string, or number, at a place."""
    made = json.loads(json.dumps(whole))
    *way, last = path[:-1] if path[-1] == "a key" else path
    inside = made
    for step in way:
        inside = inside[step]
    if path[-1] == "a key":
        inside[text] = inside.pop(last)
    else:
        inside[last] = text
    return made


@pytest.mark.parametrize(
    "evil",
    [
        "x\"'\n    raise SystemExit\n#\"\"\"''' \\",
        "a\rraise SystemExit",
        "'+str(__import__('os'))+'",
    ],
)
def test_no_string_of_a_schema_becomes_code(evil: str) -> None:
    """A node makes the program's text of what the server told, and runs it."""
    whole = json.loads(hierfl.schema(frames(), made()).json())
    fine, found = 0, list(strings(whole))
    for path in found:
        try:
            text = with_schema(made(), json.dumps(with_another(whole, path, evil))).program()
        except Refused:
            continue
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert not names & {"SystemExit", "__import__"}, path
        fine += 1
    assert len(found) > 100 and fine > 5


def test_frames_are_of_a_formula(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the nodes have frames"):
        hierfl.nodes.fit(hierfl.models.regression("bernoulli"), in_process(frames(), tmp_path))


def of_sex(first: str, second: str, n: int = 60) -> dict[str, pd.DataFrame]:
    """Four clients, the last of which writes the second spelling."""
    rng = np.random.default_rng(0)
    parts = {}
    for name in "abcd":
        sex = rng.choice(["other", first if name != "d" else second], n)
        age = rng.normal(60.0, 9.0, n)
        y = 0.03 * age + (sex == "other") * 0.5 + rng.normal(size=n)
        parts[name] = pd.DataFrame({"age": age, "sex": sex, "y": y})
    return parts


@pytest.mark.parametrize("first, second", [("m", "M"), ("male", "male "), ("\u00e9", "e\u0301")])
@pytest.mark.parametrize("text", ["y ~ age + sex", "y ~ age + C(sex)", "y ~ age + (1 | sex)"])
def test_a_node_that_spells_a_level_otherwise_is_left_out_with_both(
    first: str, second: str, text: str, tmp_path: Path
) -> None:
    formula = hierfl.formula(f"{text} + (1 | h)", clients="h")
    parts = of_sex(first, second)

    def answered(content: bytes) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, part in parts.items():
            try:
                found |= {name: answer_schema(formula, {name: part}, tmp_path / name, content)}
            except Exception:
                continue  # a node that cannot read the schema of the others does not answer
        return found

    ready, left_out, _ = agreed_over(formula, answered)
    assert [*left_out] == ["d"] and "d" not in str(ready.agreed.groups.get("h", ""))
    assert repr(first) in left_out["d"] and repr(second) in left_out["d"]
    levels = (
        ready.agreed.columns["sex"].levels if "|" not in text else ready.agreed.groups["sex"].levels
    )
    assert set(levels) == {first, "other"}


def test_the_first_category_is_the_reference_over_nodes(tmp_path: Path) -> None:
    """As of frames here; of an unordered category the name of a rare level stays at its node."""
    kinds, rng = ["low", "mid", "high"], np.random.default_rng(0)
    formula = hierfl.formula("y ~ dose + (1 | h)", clients="h")
    parts = {}
    for name in "abc":
        dose = pd.Categorical(np.resize(kinds[: 2 + (name != "a")], 60), ["secret", *kinds])
        parts[name] = pd.DataFrame({"dose": dose, "y": rng.normal(size=60)})
    here = {
        name: part.assign(dose=part["dose"].cat.set_categories(kinds))
        for name, part in parts.items()
    }
    parts["c"]["dose"] = parts["c"]["dose"].astype(str)  # words have no order
    ready, left_out, _ = agreed_over(formula, asked_of(parts, tmp_path, formula))
    assert left_out == {} and ready.agreed.columns["dose"].levels == ("low", "mid", "high")
    assert ready.agreed.columns == hierfl.schema(here, formula, min_count=5).columns
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))


def test_ids_over_nodes_are_said_to_be_none_of_the_categories(tmp_path: Path) -> None:
    formula = hierfl.formula("y ~ patient + (1 | h)", clients="h")
    parts = {
        name: part.assign(patient=[f"{name}{i}" for i in range(60)])
        for name, part in of_sex("m", "m").items()
    }
    with pytest.raises(
        ValueError, match=r"'patient' .* no value that 5 rows share, like an ID or a date"
    ):
        agreed_over(formula, asked_of(parts, tmp_path, formula))


def test_rows_that_change_in_their_place_are_not_fitted_by_what_was_read(tmp_path: Path) -> None:
    """Questions of a run read rows once; the introduction reads them again, and so does a later run."""
    formula = made("y ~ scale(age) + sex + (1 | site)")
    parts = {name: of.copy() for name, of in frames().items()}
    nodes = {name: station(formula, {name: of}, tmp_path / name) for name, of in parts.items()}

    def send(content: bytes) -> dict[str, bytes]:
        return {name: node.reply("schema", content) for name, node in nodes.items()}

    schema = agreed_over(formula, send)[0].agreed.json().encode()
    assert nodes["s0"].read and b"s0" in nodes["s0"].reply("introduce", schema)
    assert not nodes["s0"].read
    parts["s3"]["y"] += 1.0
    with pytest.raises(Refused, match="not the one that the node has answered questions about"):
        nodes["s3"].reply("introduce", schema)
    parts["s0"].loc[parts["s0"].index[:10], "age"] = np.nan  # a row that lacks a value is refused
    with pytest.raises(NodeFailed, match="column 'age' has missing values"):
        nodes["s0"].reply("schema", Question("rows").json().encode())


def test_a_node_takes_no_other_number_in_the_schema_that_it_has_answered_about(
    tmp_path: Path,
) -> None:
    """The server makes the last ones of answers alone: a node knows whether its own can be among them."""
    formula = made("y ~ scale(age) + sex + (1 | site)")
    nodes = {n: station(formula, {n: of}, tmp_path / n) for n, of in frames().items()}

    def send(content: bytes) -> dict[str, bytes]:
        return {name: node.reply("schema", content) for name, node in nodes.items()}

    schema = json.loads(agreed_over(formula, send)[0].agreed.json())
    every = [path for path in places(schema) if type(at(schema, path)) in (int, float)]
    numbers = [path for path in every if path[:2] != ("columns", "sex")]  # a category has none
    assert {path[0] for path in numbers} >= {"rows", "columns", "transforms", "design", "response"}
    for path in numbers:
        lie = with_another(schema, path, 0 if path[-1] == "sd" else 1e6 * at(schema, path) + 1e6)
        with pytest.raises(Refused):
            nodes["s0"].reply("introduce", json.dumps(lie).encode())
    lie = {**schema, "design": {**schema["design"], "age": schema["response"]}}
    with pytest.raises(Refused, match="of other columns than its design"):
        nodes["s0"].reply("introduce", json.dumps(lie).encode())
    assert b"s0" in nodes["s0"].reply("introduce", json.dumps(schema).encode())
