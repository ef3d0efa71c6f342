"""What a server can read of few rows by questions about a schema: nothing, whatever it asks and however."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl import Schema
from hierfl.cli.officer_page import entries
from hierfl.data.consistency import RowsFault
from hierfl.data.row_differences import codes_of_values
from hierfl.formulas.disclosure import coarse, isolated, singled_out, tells_of_few
from hierfl.formulas.own_rows import (
    check_design,
    check_together,
    groups_of_few,
    kept_columns,
)
from hierfl.formulas.questions import Question
from hierfl.formulas.read_rows import ReadRows
from hierfl.formulas.schema import STATEFUL, Implausible, Stateful
from hierfl.formulas.time_answers import Observed, client_logrank
from hierfl.models.families import named, piecewise_exponential
from hierfl.models.families.names import FAMILIES
from hierfl.nodes import in_process, station
from hierfl.nodes.account import Ledger
from hierfl.nodes.agreed_schema import agreed_over, answer_schema, check_fitted
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.client_rows import DESIGN
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.gate import register
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.nodes.row_sets import kept_in
from hierfl.program.recipes import describe

N = 200
Frames = dict[str, pd.DataFrame]


def rows(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = np.clip(rng.normal(60.0, 14.0, N).round(), 20.0, 99.0)
    return pd.DataFrame(
        {
            "y": rng.normal(size=N),
            "age": age,
            "income": rng.lognormal(10.0, 0.5, N).round(),
            "load": np.zeros(N),
            "constant": np.full(N, 1000.0),
            "grade": rng.choice([0.0, 2.0], N),
            "hiv": np.zeros(N, dtype=int),
            "arm": rng.choice(["a", "b"], N),
            "ward": rng.choice(["u", "v", "w"], N),
            "weight": np.ones(N),
        }
    )


def parts(value: float = 48213.0) -> Frames:
    """Two clients; in the first, one row has values that no other has."""
    north, south = rows(0), rows(1)
    north.loc[17, ["load", "constant"]] = value
    north.loc[17, "weight"] = value / 1000.0
    north.loc[17, "grade"], north.loc[17, "hiv"] = 1.0, 1
    south["load"], south["hiv"] = np.arange(N) % 7.0, np.arange(N) % 2
    south["grade"], south["constant"] = np.arange(N) % 3.0, np.arange(N) % 5.0
    return {"north": north, "south": south}


def formula(text: str, family: str = "gaussian") -> hierfl.Formula:
    return hierfl.formula(f"{text} + (1 | hospital)", family, clients="hospital")


def transcript(made: hierfl.Formula, of: Frames, folder: Path) -> list[Any]:
    """Return what the first client answers to an honest server."""
    answers: list[Any] = []

    def send(content: bytes) -> dict[str, bytes]:
        said = {n: answer_schema(made, {n: f}, folder / n, content) for n, f in of.items()}
        answers.append(json.loads(said["north"])["answer"])
        return said

    try:
        agreed_over(made, send)
    except ValueError as error:  # of a column of one value, for example
        answers.append(str(error))
    return answers


TEXTS = {
    "a number": "y ~ scale(load)",
    "all but one": "y ~ constant",
    "a product": "y ~ age:load",
    "a function": "y ~ log1p(load) + I(load * age)",
    "an offset": "y ~ age + offset(load)",
    "weights": "y | weights(weight) ~ age",
    "the response": "load ~ age",
    "polynomials": "y ~ poly(load, 3)",
    "a curve times a number": "y ~ s(age, by=load)",
    "a curve of a level": "y ~ s(age) + load:arm",
    "levels by numbers": "y ~ arm * load + ward",
}


@pytest.mark.parametrize("name", TEXTS)
def test_answers_do_not_depend_on_the_values_of_one_row(name: str, tmp_path: Path) -> None:
    made = formula(TEXTS[name])
    one = transcript(made, parts(48213.0), tmp_path / "one")
    other = transcript(made, parts(31.0 if name != "all but one" else 70000.0), tmp_path / "other")
    assert one == other and "columns" in one[-1]  # honest clients agree, also of large offsets


@pytest.mark.parametrize("dtype", [object, "Int64", "Float64"])
def test_numbers_of_any_dtype_are_coarse(dtype: Any, tmp_path: Path) -> None:
    made, content = formula("y ~ scale(load)"), Question("columns", 5).json().encode()
    for value in (48213.0, 31.0):
        north = parts(value)["north"].astype({"load": dtype})
        said = json.loads(answer_schema(made, {"north": north}, tmp_path / str(value), content))
        assert said["answer"]["load"]["sums"] == {"count": N, "total": 0.0, "squares": 0.0}
        (fitted,) = ReadRows(made.declared, north, "north", 5).moved.values()
        assert not fitted.any()


def test_a_number_that_one_row_has_of_three_is_not_counted(tmp_path: Path) -> None:
    found = transcript(formula("y ~ grade + hiv"), parts(), tmp_path)
    of = parts()["north"]
    twos = int((of["grade"] == 2.0).sum())
    assert found[0]["grade"]["sums"]["total"] in (2.0 * twos, 2.0 * twos + 2.0)
    assert found[0]["hiv"]["sums"] == {"count": N, "total": 0.0, "squares": 0.0}


def test_levels_that_are_few_beside_others_are_rounded(tmp_path: Path) -> None:
    """The rows of the reference level are those of no column: n less the others' sums."""
    found = []
    for few in (2, 3, 4):
        of = parts()
        level = of["north"]["ward"].replace("u", "v").to_numpy()
        level[:67] = "w"
        level[67:] = "v"
        level[:few] = "u"
        of["north"]["ward"] = level
        of["north"] = of["north"].assign(arm=np.where(np.arange(N) % 2, "a", "b"))
        found.append(transcript(formula("y ~ ward * arm"), of, tmp_path / str(few))[-1]["columns"])
    assert found[0]["ward[v]"]["total"] == N - 67
    assert [one["ward[w]"] for one in found] == [found[0]["ward[w]"]] * 3


CONSTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "knots at each age": ("s(age)", lambda c: replace(c, knots=tuple(map(float, range(20, 101))))),
    "knots around one patient": (
        "s(age)",
        lambda c: replace(c, knots=tuple(np.linspace(98.0, 100.0, len(c.knots)))),
    ),
    "knots in the middle of nobody": (
        "s(age)",
        lambda c: replace(c, knots=(c.knots[0], *np.linspace(60.2, 60.8, 8), c.knots[-1])),
    ),
    "knots that fall": ("s(age)", lambda c: replace(c, knots=c.knots[::-1])),
    "a smooth's degree": ("s(age)", lambda c: replace(c, degree=2)),
    "a spline's degree": ("bs(age, df=5)", lambda c: replace(c, degree=0)),
    "a spline's knots": (
        "bs(age, df=5)",
        lambda c: replace(c, knots=(*c.knots[:4], 70.0, 86.5, *c.knots[-4:])),
    ),
    "more knots": ("bs(age, df=5)", lambda c: replace(c, knots=(*c.knots[:5], 61.0, *c.knots[5:]))),
    "a process's size": ("gp(age)", lambda c: replace(c, degree=80)),
    "a process's range": ("gp(age)", lambda c: replace(c, boundary=1e3)),
    "another degree": (
        "poly(age, 2)",
        lambda c: replace(c, degree=9, polynomials=((1.0,) * 10,) * 9),
    ),
    "other polynomials": (
        "poly(age, 2)",
        lambda c: replace(c, polynomials=((0.0, 1.0, 0.0), (5.0, 3.0, 1.0))),
    ),
    "knots of a scale": ("scale(age)", lambda c: replace(c, knots=(1.0, 2.0))),
    "a scale of one patient": ("scale(age)", lambda c: replace(c, mean=98.0, sd=1e-3)),
    "a small scale": ("scale(age)", lambda c: replace(c, sd=0.5)),
    "a center far away": ("center(age)", lambda c: replace(c, mean=1e9)),
    "no numbers": ("scale(age)", lambda c: replace(c, sd=0.0)),
    "a smooth of no knots": ("s(age)", lambda c: replace(c, knots=())),
    "a spline of two knots": ("bs(age, df=5)", lambda c: replace(c, knots=(50.0, 60.0))),
    "a process of no range": ("gp(age)", lambda c: replace(c, knots=())),
    "polynomials that are singular": (
        "poly(age, 2)",
        lambda c: replace(c, polynomials=((1e150, 1e-308, 0.0), (1e150, 1e150, 1e-308))),
    ),
}


@cache
def agreed(text: str) -> tuple[hierfl.Formula, Schema]:
    made = formula(text)
    return made, hierfl.schema(parts(), made, min_count=5)


def design(made: hierfl.Formula, schema: Schema, of: Frames, folder: Path) -> Any:
    content = Question("design", 5, schema=replace(schema, design={}, response=None)).json()
    return json.loads(answer_schema(made, {"north": of["north"]}, folder, content.encode()))


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_node_refuses_constants_that_nobody_can_have_agreed_on(name: str, tmp_path: Path) -> None:
    (text, change), of = CONSTANTS[name], parts()
    made, schema = agreed(f"y ~ {text}")
    assert design(made, schema, of, tmp_path / "honest")["answer"]["columns"]
    changed = {text: change(schema.transforms[text])}
    with pytest.raises(Refused, match=text.partition("(")[0]):
        design(made, replace(schema, transforms=changed), of, tmp_path / "hostile")


def test_refusals_do_not_search_for_a_patient(tmp_path: Path) -> None:
    """Whether knots set few rows apart is a bit; a server has as many a day as the policy has questions."""
    of = parts()
    made, schema = agreed("y ~ s(age)")
    (tmp_path / "policy.toml").write_text("questions_a_day = 3\n")
    (constants,) = schema.transforms.values()
    why = []
    for end in range(4):
        knots = (constants.knots[0], *np.linspace(60.1, 60.9 - 0.1 * end, 8), constants.knots[-1])
        changed = {"s(age)": replace(constants, knots=tuple(map(float, knots)))}
        for _ in range(2):  # the same question tells nothing new
            with pytest.raises(Refused) as error:
                design(made, replace(schema, transforms=changed), of, tmp_path)
        why.append(str(error.value))
    assert ["3 failed questions a day" in of for of in why] == [False] * 3 + [True]
    with pytest.raises(Refused, match="3 failed questions a day"):
        design(made, schema, of, tmp_path)  # an honest one


def test_a_node_refuses_constants_of_functions_that_have_none(tmp_path: Path) -> None:
    of = parts()
    made, schema = agreed("y ~ scale(log(age))")
    (constants,) = schema.transforms.values()
    more = {**schema.transforms, "log(age)": constants}
    with pytest.raises(Refused, match="other transforms"):
        design(made, replace(schema, transforms=more), of, tmp_path / "more")
    with pytest.raises(Refused, match="other transforms"):
        design(made, replace(schema, transforms={}), of, tmp_path / "less")
    with pytest.raises(Refused, match="another formula"):
        design(made, replace(schema, formula="y ~ age"), of, tmp_path / "other")


def test_a_node_counts_no_values_around_one_patient(tmp_path: Path) -> None:
    of = parts()
    made, schema = agreed("y ~ s(age)")
    before = replace(schema, transforms={}, design={}, response=None)
    asked = Question("call", 5, text="s(age)", at=(98.0, 1e-3), schema=before)
    with pytest.raises(Refused, match=r"mean and sd of 's\(age\)'"):
        answer_schema(made, {"north": of["north"]}, tmp_path, asked.json().encode())


@pytest.mark.filterwarnings("ignore:k-hat", "ignore:the rounds ended", "ignore:client")
def test_a_value_of_few_rows_leaves_no_node_out_and_reaches_nobody(tmp_path: Path) -> None:
    """A node fits the nearest other value, says so, and all that leaves it is the same for any value."""
    sent = []
    for name, value in (("one", 48213.0), ("other", 31000.0)):
        of = {k: rows(i) for i, k in enumerate(("north", "south"))}
        for frame in of.values():
            frame["load"], frame["hiv"] = np.arange(N) % 7.0, np.arange(N) % 2
        of["north"]["hiv"] = 0
        of["north"].loc[17, ["load", "hiv"]] = value, 1
        made = formula("y ~ scale(load) + hiv")
        with pytest.warns(
            UserWarning, match="'north' fits its rows with values of hiv, load moved"
        ):
            fit = hierfl.nodes.fit(made, in_process(of, tmp_path / name), rounds=1)
        assert fit.clients == ("north", "south")
        sent.append([line["sha256"] for line in entries(tmp_path / name / "north")])
    assert sent[0] == sent[1] and len(sent[0]) > 5


@pytest.mark.filterwarnings("ignore")
def test_clients_that_join_are_held_as_the_others_are(tmp_path: Path) -> None:
    """Their nodes begin with the schema that the others have agreed on."""
    of = {k: rows(i) for i, k in enumerate(("north", "south"))}
    for frame in of.values():
        frame["hiv"] = np.arange(N) % 2
    fit = hierfl.nodes.fit(formula("y ~ hiv + I(age > 75)"), in_process(of, tmp_path), rounds=1)
    east = rows(7).assign(hiv=np.arange(N) == 17)
    east["hiv"] = east["hiv"].astype(int)
    with pytest.warns(UserWarning, match="'east' fits its rows with values of hiv moved"):
        assert "east" in fit.updated(in_process({"east": east}, tmp_path)).clients
    east["age"] = np.where(np.arange(N) < 3, 90.0, 60.0 + np.arange(N) % 9)
    with pytest.raises(Refused, match=r"column 'I\(age > 75\)' singles out fewer"):
        fit.updated(in_process({"east": east}, tmp_path / "again"))
    # a server that asks for no introduction
    model: Any = fit.method.model
    made = station(model, {"east": east}, tmp_path / "east")
    agreement = Agreement.between([Introduction.of(model.data({"east": east}))])
    begins = {"agreement": asdict(agreement), "method": describe(fit.method), "seed": 0}
    request = write_request("agree", json.dumps(begins).encode())
    with pytest.raises(Refused, match="singles out fewer"):
        read_answer(request, made.answer(request))


@pytest.mark.filterwarnings("ignore:k-hat", "ignore:the rounds ended", "ignore:client")
def test_an_outcome_of_few_rows_is_not_moved(tmp_path: Path) -> None:
    of = {k: rows(i) for i, k in enumerate(("north", "south"))}
    of["south"]["hiv"] = np.arange(N) % 2
    of["north"].loc[17, "hiv"] = 1
    nodes = in_process(of, tmp_path)
    with pytest.warns(UserWarning, match="'north' is left out: the column 'hiv' singles out"):
        fit = hierfl.nodes.fit(formula("hiv ~ age", "bernoulli"), nodes, rounds=1)
    assert fit.clients == ("south",)


@pytest.mark.filterwarnings("ignore")
def test_no_sums_of_a_group_of_few_rows_leave(tmp_path: Path) -> None:
    """A factor has X'X and X'y of each group within a client: those of one row are its values, of five not."""
    of = {k: rows(i) for i, k in enumerate(("north", "south"))}
    of["north"].loc[0, "ward"] = of["south"].loc[:4, "ward"] = "attic"
    made = formula("y ~ age + (1 | hospital:ward)")
    why = r"'north' is left out: .* sums of each group of 'hospital:ward', .* disclose='sums'"
    with pytest.warns(UserWarning, match=why):
        fit = hierfl.nodes.fit(made, in_process(of, tmp_path), rounds=1)
    assert fit.history["clients"].tolist() == [1]
    nodes = in_process(of, tmp_path / "sums")  # over all rows
    fit = hierfl.nodes.fit(made, nodes, rounds=1, disclose="sums")
    assert fit.history["clients"].tolist() == [2]


def test_no_sums_of_a_group_are_of_few_rows_by_its_columns() -> None:
    own = rows(0).assign(late=np.arange(N) % 2)
    made = formula("y ~ age + (1 + late | hospital:ward)")
    for few in (0, 3, 5):
        attic = np.flatnonzero(own["ward"] == "u")
        own.loc[attic, "late"] = (np.arange(len(attic)) < few).astype(int)
        ready = made.on({"north": own, "south": rows(1).assign(late=np.arange(N) % 2)})
        ready = replace(ready, schema=replace(ready.agreed, min_count=5))
        assert bool(groups_of_few(ready, {"north": own}, 5)) == (few == 3)


COMBINED = {
    "a column and one that differs in few rows": "y ~ income + I(income + 1000 * (age > 96))",
    "scaled": "y ~ scale(income) + scale(income + 1000 * (age > 96))",
    "a product and a number": "y ~ income * arm + I(income * (age > 96) + income)",
    "a group of few rows": "y ~ income + (1 | room)",
    "a slope that few rows of a group have": "y ~ income + (1 + visits | room)",
    "a weight that one row has": "y | weights(heavy) ~ income",
    "a slope behind a bar": "y ~ income + (0 + I(age > 96) | hospital)",
    "a slope of groups within": "y ~ income + (0 + I(age > 96) | hospital:ward)",
    "a number far above all others": "y ~ fortune",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMBINED)
def test_no_combination_of_a_designs_columns_is_of_few_rows(name: str) -> None:
    """A round's X'X would have them: of two columns' difference, of a group."""
    of = {k: rows(seed) for seed, k in enumerate(("north", "south", "west"))}
    few = {"a group of few rows": 3, "a slope that few rows of a group have": 40}.get(name, 20)
    for client, frame in of.items():
        frame["age"] = frame["age"].clip(upper=90.0)
        frame.loc[: 0 if client == "north" else 9, "age"] = 97.0
        frame["room"] = np.where(np.arange(N) < (few if client == "north" else 60), "a", "b")
        frame["visits"] = np.arange(N) % 4.0
        frame["heavy"], frame["fortune"] = 1.0 + frame["visits"], 1.0 + frame["income"]
        if client == "north":
            frame.loc[2:39, "visits"] = 0.0
            frame.loc[3, ["heavy", "fortune"]] = 1e9
    known: Any = {"room": ["a", "b"]} if "room" in COMBINED[name] else {}
    text = f"{COMBINED[name]} + (1 | hospital)"
    columns = hierfl.schema(of, clients="hospital", levels=known) if known else None
    ready = hierfl.formula(text, "gaussian", clients="hospital", schema=columns).on(of)
    check_design(ready, of["south"], "south", 5)
    with pytest.raises(Implausible, match="singles out fewer"):
        check_design(ready, of["north"], "north", 5)


# formula, family -> what picks rows in which all but one have no dose
PICKED = {
    "y ~ dose + arm": "arm",
    "y ~ dose * arm": "arm",
    "late ~ dose + arm": "late",
    "y ~ dose + (1 | hospital:ward)": "ward",
    "y ~ dose + (0 + age | hospital:ward)": "ward",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", PICKED)
def test_no_sum_beside_a_level_or_group_is_of_few_rows(text: str) -> None:
    """X'X has the sum of each number in the rows of each level, and of each group."""
    of = {k: rows(seed) for seed, k in enumerate(("north", "south"))}
    for frame in of.values():
        frame["dose"] = np.random.default_rng(3).gamma(2.0, 5.0, N).round(2)
        frame["late"] = np.random.default_rng(4).integers(0, 2, N)
    ready = formula(text, "bernoulli" if "late" in text else "gaussian").on(of)
    ready = replace(ready, schema=replace(ready.agreed, min_count=5))
    own = of["north"]
    picked = np.flatnonzero(own[PICKED[text]] == own[PICKED[text]].max())
    for few in (5, 1):
        own.loc[picked[few:], "dose"] = 0.0
        why = groups_of_few(ready, {"north": own}, 5)
        try:
            check_design(ready, own, "north", 5)
        except Implausible as error:
            why = why or str(error)
        assert bool(why) == (few == 1), why


@pytest.mark.parametrize(
    "text", ["y ~ dose + pill", "y ~ log1p(dose) + scale(pill)", "dose ~ pill"]
)
def test_no_product_of_two_numbers_is_of_few_rows(text: str) -> None:
    """X'X has the sum of the products of two numbers, most of which are 0."""
    of = {k: rows(seed) for seed, k in enumerate(("north", "south"))}
    rng, own = np.random.default_rng(5), of["north"]
    for frame in of.values():
        for name in ("dose", "pill"):
            frame[name] = rng.gamma(2.0, 5.0, N).round(2)
    ready = formula(text).on(of)
    ready = replace(ready, schema=replace(ready.agreed, min_count=5))
    own.loc[own.index[: N // 2], "dose"] = 0.0
    for both in (5, 1):
        own.loc[own.index[N // 2 + both :], "pill"] = 0.0
        if both == 5:
            check_design(ready, own, "north", 5)
            continue
        with pytest.raises(Implausible, match="the product of"):
            check_design(ready, own, "north", 5)


# formula -> whether its node may tell of a column of which one row has such a value among 200 others
OUTLIERS: dict[str, dict[float, bool]] = {
    "y ~ x": {4.0: True, 21.37: True, 5000.0: False},
    "y ~ log1p(abs(x))": {21.37: True, 5000.0: False},
    "y ~ scale(x)": {21.37: True, 5000.0: False},
    "y ~ poly(x, 3)": {4.0: True, 21.37: False, 5000.0: False},
    "y ~ x:arm": {21.37: True, 5000.0: False},
    "x ~ age": {21.37: True, 5000.0: False},
    "y ~ age + offset(x)": {21.37: True, 5000.0: False},
    "y ~ dose": {3.5: False},  # of three values, one of them once
    "dose ~ age": {3.5: True},
}


@pytest.mark.parametrize("text", OUTLIERS)
def test_a_schema_tells_of_the_values_that_rounds_send_or_no_round_begins(
    text: str, tmp_path: Path
) -> None:
    """Sums of coarser values, less those of X'X, would be the outlier to every digit."""
    made = formula(text)
    for value, may_begin in OUTLIERS[text].items():
        of = {k: rows(seed) for seed, k in enumerate(("north", "south"))}
        for seed, frame in enumerate(of.values()):
            frame["x"] = np.random.default_rng(seed + 9).normal(size=N)
            frame["dose"] = np.arange(N) % 2.0
        of["north"].loc[17, "dose" if "dose" in text else "x"] = value
        ready = hierfl.formula(
            f"{text} + (1 | hospital)",
            "gaussian",
            clients="hospital",
            schema=hierfl.schema(of, made),
        )
        try:
            check_design(ready, of["north"], "north", 5)
            begins = True
        except Implausible:
            begins = False
        found = transcript(made, of, tmp_path / str(value))
        begins &= isinstance(found[-1], dict)  # of powers no sums are told
        assert begins is may_begin, value
        for name, column in found[0].items() if begins else ():
            values = of["north"][name]
            if column["sums"]:
                assert column["sums"]["squares"] == float((values.to_numpy() ** 2).sum()), name


def test_values_that_a_schema_has_made_coarser_are_compared(tmp_path: Path) -> None:
    """A response is told of as it is, and a covariate without a value of few rows: the difference is that value."""
    of = {
        k: rows(seed).assign(dose=np.arange(N) % 2.0) for seed, k in enumerate(("north", "south"))
    }
    of["north"].loc[17, "dose"] = 3.5
    as_response = transcript(formula("dose ~ age"), of, tmp_path)
    assert as_response[0]["dose"]["sums"]["total"] == of["north"]["dose"].sum()
    with pytest.raises(Refused, match="fewer than 5 rows have changed"):
        content = Question("columns", 5).json().encode()
        answer_schema(
            formula("age ~ dose + arm"), {"north": of["north"]}, tmp_path / "north", content
        )


def test_all_questions_about_some_rows_are_of_one_least_count(tmp_path: Path) -> None:
    """Sums for 5 rows and for 6 are of values that differ in the fifth."""
    of = parts()
    made, schema = agreed("y ~ scale(age)")
    own = {"north": of["north"]}
    answer_schema(made, own, tmp_path, Question("columns", 5).json().encode())
    before = replace(schema, transforms={}, design={}, response=None)
    for least in (6, 5):
        asked = Question("call", least, text="scale(age)", schema=replace(before, min_count=least))
        with pytest.raises(Refused, match="a node answers once") if least > 5 else nullcontext():
            answer_schema(made, own, tmp_path, asked.json().encode())


PAIRED = {
    "two covariates": ("y ~ age + ill + arm", "gaussian"),
    "a scaled one": ("y ~ scale(ill) + age + arm", "gaussian"),
    "a covariate and a response": ("ill ~ age + arm", "bernoulli"),
    "a covariate and a response of names": ("arm ~ age + ill", "bernoulli"),
    "a covariate and an event": ("time | event(ill) ~ age + arm", "weibull"),
}


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_values_of_few_rows_are_refused_where_the_owner_says_so(name: str) -> None:
    """X'X and X'y have the four counts of two columns of yes and no."""
    text, family = PAIRED[name]
    own = rows(0).assign(time=np.arange(N) + 1.0, ill=(np.arange(N) < 40).astype(int))
    made = hierfl.formula(f"{text} + (1 | hospital)", family, clients="hospital")
    for few in (0, 3, 5):
        own["arm"] = np.where(np.arange(N) < few, "a", np.where(np.arange(N) < 100, "b", "a"))
        ready = made.on({"north": own, "south": own})
        check_design(ready, own, "north", 5)
        with pytest.raises(Implausible, match="min_joint_count") if few == 3 else nullcontext():
            check_design(ready, own, "north", 5, 5)


# a formula, its family, and of a column the usual value, another one, and others of the second client
BESIDE: dict[str, tuple[str, Any, dict[str, tuple[Any, ...]]]] = {
    "an event": ("time | event(ill) ~ age", "weibull", {"ill": (0, 1)}),
    "a censored time": ("time | cens(state) ~ age", "weibull", {"state": ("none", "right")}),
    "trials": ("k | trials(n) ~ age", "binomial", {"n": (1, 10**6)}),
    "an entry": ("time | event(ill) + entry(start) ~ age", "weibull", {"start": (0.0, 0.005)}),
    "weights": ("y | weights(w) ~ age", "gaussian", {"w": (1.0, 9.0)}),
    "a name of two": ("state ~ age", "bernoulli", {"state": ("in", "out")}),
    "a name of several": ("state ~ age", "categorical", {"state": ("in", "out", "moved")}),
    "an ordered level": ("state ~ age", "cumulative", {"state": (1, 2, 3)}),
    "a code of censoring": ("time | cens(code) ~ age", "weibull", {"code": (0, -1, 1)}),
    "an end of an interval": (
        "time | cens(kind, upto) ~ age",
        "weibull",
        {"upto": (300.0, 400.0)},
    ),
    "zeros of a hurdle": ("dose ~ age; hu ~ age", "hurdle_gamma", {"dose": (2.5, 0.0, 7.0)}),
    "more zeros": ("k ~ age; zi ~ age", "zero_inflated_poisson", {"k": (3, 0, 4, 5)}),
    "ones of shares": ("share ~ age", "ordered_beta", {"share": (0.5, 1.0, 0.0)}),
    "times before a break": (
        "end ~ age",
        piecewise_exponential(breaks=(1.0, 9.0)),
        {"end": (2.0, 0.5, 9.5)},
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_a_response_is_of_enough_rows(name: str) -> None:
    """X'y of one event has the covariates of its patient, and so has a row that counts more than all others."""
    text, family, values = BESIDE[name]
    ((column, (usual, other, *others)),) = values.items()
    made = hierfl.formula(f"{text} + (1 | hospital)", family, clients="hospital")
    own = rows(0).assign(time=np.arange(N) + 1.0, k=np.arange(N) % 2, ill=np.arange(N) % 2)
    own["kind"] = "interval"
    for count in (1, 4, 5, 100):
        own[column] = np.where(np.arange(N) < count, other, usual)
        south = own.assign(**{column: np.resize([usual, other, *others], N)})
        ready = made.on({"north": own, "south": south})
        with pytest.raises(Implausible) if count < 5 else nullcontext():
            check_design(ready, own, "north", 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_from_where_on_its_likelihood_is_another(name: str) -> None:
    """A density that jumps at 0 or 1 counts the responses there."""
    family = named(name)
    parts = ("Hurdle", "ZeroInflated", "OrderedBeta", "PiecewiseExponential")
    assert bool(family.edges) is any(part in family.likelihood for part in parts)
    assert [*family.edges] == sorted({*family.edges})


def test_rows_that_lack_a_value_are_not_told_by_those_that_have_one() -> None:
    """A part of `mi(x)` sums the rows with a value, and the others all rows."""
    made = formula("y ~ mi(income) + age + (1 | hospital); income | mi() ~ grade")
    own = rows(0)
    for few in (0, 1, 4, 5):
        lacks = own.assign(income=np.where(np.arange(N) < few, np.nan, own["income"]))
        ready = made.on({"north": lacks, "south": rows(1).assign(income=np.nan).combine_first(own)})
        with pytest.raises(Implausible, match="lacks") if few in (1, 4) else nullcontext():
            check_design(ready, lacks, "north", 5)


@pytest.mark.parametrize("bars", ["(1 | room)", "(1 + age | room)"])
def test_a_refusal_names_no_group_that_is_not_agreed_on(bars: str) -> None:
    """A server that makes up the groups of a schema is told that there are others, and not which."""
    agreed_on = {k: rows(i).assign(room=np.tile(["a", "b"], 100)) for i, k in enumerate("ns")}
    own = agreed_on["n"].copy()
    own.loc[3, "room"] = "villa"
    made = formula(f"y ~ age + {bars}").on(agreed_on)
    assert made.agreed.groups["room"].levels == ("a", "b")
    with pytest.raises(RowsFault, match="villa") as error:
        check_design(made, own, "n", 5)
    assert error.value.public == "column 'room' has a group that is not an agreed one"


@pytest.mark.filterwarnings("ignore")
def test_curves_of_many_formulas_do_not_single_out_a_row_together(tmp_path: Path) -> None:
    """Each has a few sums of functions of age; all of them together count the patients of each age."""
    of = {"north": rows(0), "south": rows(1)}
    for frame in of.values():
        frame["age"] = frame["age"].clip(30.0, 80.0)
    of["north"].loc[17, "age"] = 90.0
    answered = 0
    for k in range(3, 40, 3):
        found = transcript(formula(f"y ~ s(age, k={k})"), of, tmp_path)
        answered += isinstance(found[-1], dict) and "columns" in found[-1]
        if not (isinstance(found[-1], dict) and "columns" in found[-1]):
            assert "earlier answers" in found[-1]
    assert 2 <= answered <= 10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("texts", [["y ~ age + later"], ["y ~ age", "y ~ I(age / later)"]])
def test_sums_of_two_columns_do_not_differ_by_few_rows(texts: list[str], tmp_path: Path) -> None:
    """Ages of two visits that differ in one row: the two totals give the difference, and their squares the age."""
    north = rows(0).assign(later=lambda f: f.age)
    question = Question("columns", 5).json().encode()

    def asked(text: str, later: float, folder: str) -> Any:
        north.loc[17, "later"] = north.loc[17, "age"] + later
        return answer_schema(formula(text), {"north": north}, tmp_path / folder, question)

    for text in texts[:-1]:
        asked(text, 3.0, "few")
    with pytest.raises(Forbidden, match="fewer than 5"):
        asked(texts[-1], 3.0, "few")
    north["later"] = np.random.default_rng(9).permutation(north["later"])
    assert [asked(text, 3.0, "many") for text in texts]


def test_what_one_row_lacks_is_not_the_difference_of_two_sums(tmp_path: Path) -> None:
    north = rows(0).assign(later=lambda f: f.age)
    north.loc[17, "later"] = np.nan
    made = hierfl.formula(["y ~ age + mi(later) + (1 | h)", "later | mi() ~ income"], clients="h")
    with pytest.raises(Forbidden, match="fewer than 5"):
        answer_schema(made, {"north": north}, tmp_path, Question("columns", 5).json().encode())


def test_powers_are_looked_at_beside_curves_of_other_formulas(tmp_path: Path) -> None:
    """poly(age, 3) tells of powers up to the sixth, of which its design has three."""
    of = {"north": rows(0), "south": rows(1)}
    terms = ["poly(age, 3)", *(f"s(age, k={k})" for k in (3, 5, 6, 7, 9, 11, 12))]
    for frame in of.values():
        frame["age"] = frame["age"].clip(30.0, 80.0)
    of["north"].loc[17, "age"] = 90.0
    for term in terms:
        transcript(formula(f"y ~ {term}"), of, tmp_path)
    ledger = Ledger.at(tmp_path / "north")
    names = [entry.request for entry in ledger.entries if entry.kind == DESIGN]
    told = [
        np.frombuffer(kept_in(ledger.folder, n), offset=8).reshape(-1, N).T[:, 1:] for n in names
    ]
    assert told[0].shape == (N, 6) and not tells_of_few(np.hstack(told), 5)
    assert 3 < len(told) < 1 + len(terms)


def test_powers_together_do_not_single_out_a_row() -> None:
    """None has most of its squares in the row of 90 years; a combination of twelve has all."""
    age = np.append(rows(0)["age"].clip(30.0, 80.0), 90.0)
    assert singled_out(age, 5, 6).tolist() == [N]
    assert not len(singled_out(age, 5, 2)) and not len(singled_out(age[:N], 5, 4))


# two fits of the same rows, whose columns differ in one of them: formulas, family, columns of rows
TWO_FITS: dict[str, tuple[str, str, tuple[Any, Any]]] = {
    "outcomes that are numbers": ("{} ~ age", "gaussian", (0.0, 1.0)),
    "outcomes of yes and no": ("{} ~ age", "bernoulli", (0, 1)),
    "names": ("{} ~ age", "bernoulli", ("in", "out")),
    "events": ("time | event({}) ~ age", "weibull", (0, 1)),
    "weights": ("y | weights({}) ~ age", "gaussian", (1.0, 2.0)),
    "offsets": ("y ~ age + offset({})", "gaussian", (0.0, 1.0)),
    "groups": ("y ~ age + (1 | {})", "gaussian", ("a", "b")),
}
# what happens to a node's folder between them
BETWEEN: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "what was asked of is emptied": lambda folder: [
        path.write_bytes(b"") for path in (folder / "rows").iterdir()
    ],
    "as before they were asked": lambda folder: shutil.rmtree(folder / "rows"),
    "other values": lambda folder: [
        path.write_bytes(bytes(path.stat().st_size)) for path in (folder / "rows").iterdir()
    ],
}


@pytest.mark.parametrize("name", TWO_FITS)
@pytest.mark.filterwarnings("ignore")
def test_two_fits_of_the_same_rows_do_not_tell_of_few_by_their_difference(
    name: str, tmp_path: Path
) -> None:
    """X'y of death within 30 days, and within 31, are the covariates of the patient who died between."""
    text, family, (no, yes) = TWO_FITS[name]
    own = rows(0).assign(time=np.arange(N) + 1.0)
    own["first"] = np.where(np.arange(N) % 5 == 0, yes, no)
    for few in (1, 6):
        own["second"] = np.where(np.arange(N) < few + 1, yes, own["first"])
        for column in ("first", "second"):
            made = hierfl.formula(
                f"{text.format(column)} + (1 | hospital)", family, clients="hospital"
            ).on({"north": own, "south": own})
            ready = replace(made, schema=replace(made.agreed, min_count=5))
            is_refused = (few, column) == (1, "second")
            with pytest.raises(Forbidden, match="earlier") if is_refused else nullcontext():
                check_fitted(tmp_path / str(few), ready, {"north": own}, {"north": own}, Policy())


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.filterwarnings("ignore")
def test_what_was_fitted_before_is_not_forgotten(between: str, tmp_path: Path) -> None:
    """Not with the files that have it, nor by sorting the rows, nor as columns are added."""
    first, nodes = (np.arange(N) % 5 == 0) * 1.0, []
    whole = rows(0).assign(first=first, second=np.where(np.arange(N) == 1, 1.0, first))
    for column, order, later in (("first", "income", ["second"]), ("second", "age", [])):
        own = whole.sort_values(order, ignore_index=True).drop(columns=later)
        made = formula(f"y ~ age + {column}").on({"north": own, "south": own})
        method = replace(made, schema=replace(made.agreed, min_count=5))
        nodes.append(station(method, {"north": own}, tmp_path / "north"))
    request = write_request("introduce", b"")
    read_answer(request, nodes[0].answer(request))
    BETWEEN[between](tmp_path / "north")
    with pytest.raises(Refused, match=r"earlier|does not add up"):
        read_answer(request, nodes[1].answer(request))


def test_another_formula_asks_nothing_new_of_the_same_columns(tmp_path: Path) -> None:
    of = parts()
    for text in ("y ~ age", "y ~ 1 + age"):
        own = Question("columns", 5).json().encode()
        assert answer_schema(formula(text), {"north": of["north"]}, tmp_path, own)
    other = Question("columns", 6).json().encode()
    for clients in ("hospital", "any"):  # a task names the clients' column
        made = hierfl.formula(f"y ~ age + 1 + (1 | {clients})", "gaussian", clients=clients)
        with pytest.raises(Refused, match="a node answers once"):
            answer_schema(made, {"north": of["north"]}, tmp_path, other)


def test_nothing_is_registered_without_a_check() -> None:
    with pytest.raises(TypeError, match="agrees"):
        Stateful("")  # type: ignore[call-arg]
    hurried: Any = register
    with pytest.raises(TypeError, match="disclosure"):
        hurried("rows", asks="schema", request=Question, handler=print, account="schema")
    assert all(isinstance(of, Stateful) for of in STATEFUL.values())


def test_rows_that_a_combination_of_columns_singles_out() -> None:
    ages = np.repeat(np.arange(20.0, 40.0), 10)
    bumps = np.stack([np.exp(-((ages - k) ** 2)) for k in (22.0, 30.0)], axis=1)
    assert not len(isolated(bumps, 5))
    lone = np.append(ages, 70.0)
    bumps = np.stack([np.exp(-((lone - k) ** 2)) for k in (22.0, 70.0)], axis=1)
    assert isolated(bumps, 5).tolist() == [200]
    assert not len(isolated(bumps, 1))


@pytest.mark.parametrize("few", [1, 3, 4])
def test_values_of_few_rows_become_the_nearest_others(few: int) -> None:
    values = np.r_[np.zeros(50), np.full(few, 7.0), np.full(50, 10.0)]
    assert set(coarse(values, 5)) == {0.0, 10.0}
    assert set(coarse(np.r_[np.full(90, 1000.0), np.full(few, 48213.0)], 5)) == {1000.0}
    whole = np.random.default_rng(0).normal(size=100)
    assert np.array_equal(coarse(whole, 5), whole)
    assert not any(len(coarse(whole, least)) for least in (99, 100, 10**9))
    assert np.array_equal(coarse(np.r_[np.zeros(50), np.full(5, 7.0)], 5)[50:], np.full(5, 7.0))


def observed(end: Any, event: Any) -> Observed:
    """Return times without late entries and weights."""
    every = np.asarray(end, float)
    return Observed(every, event, np.full(len(every), -np.inf), np.ones(len(every)))


def test_log_rank_sums_of_few_rows_do_not_tell_their_order() -> None:
    rng, names = np.random.default_rng(0), np.repeat(["a", "b"], 6)
    answers = {
        str(client_logrank(observed(1.0 + rng.permutation(12), np.ones(12, bool)), names, 5))
        for _ in range(40)
    }
    assert len(answers) == 1


def test_log_rank_sums_of_ranges_test_as_those_of_times_do() -> None:
    rng, z = np.random.default_rng(0), []
    for _ in range(100):
        names = np.repeat(["a", "b"], 500)
        times, ends = rng.exponential(size=1000), rng.exponential(2.0, 1000)
        whole, by_range = (
            client_logrank(observed(np.minimum(times, ends), times < ends), names, n)
            for n in (1, 5)
        )
        assert whole is not None and by_range is not None
        z.append([s.excess[0] / s.covariance[0][0] ** 0.5 for s in (whole, by_range)])
    assert np.corrcoef(np.array(z).T)[0, 1] > 0.97 and 0.8 < np.std(z, axis=0)[1] < 1.2


def test_designs_are_compared_whatever_row_or_column_has_left() -> None:
    """The codes of the rows that are left may be those with which the earlier ones begin."""
    declared: Any = SimpleNamespace(rows_of={"x": "number"}, columns_read=())
    frame, key, columns = pd.DataFrame({"x": np.arange(40.0)}), b"k" * 32, np.ones((40, 2))
    earlier = kept_columns(ReadRows(declared, frame, "north"), columns, key)
    order = np.argsort(codes_of_values(frame["x"].to_numpy(), key), kind="stable")
    fewer = frame.iloc[np.sort(order[:-1])].reset_index(drop=True)
    rows = ReadRows(declared, fewer, "north", 5)
    now = kept_columns(rows, columns[:-1], key)
    check_together([(*now, True), (*earlier, True)], rows, key)
    rows = ReadRows(declared, frame, "north", 5)
    check_together([(*earlier, True), (("gone",), b"-" * 9, True)], rows, key)
