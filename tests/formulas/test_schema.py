"""What clients agree on: the moments of all rows from sums alone, levels that nobody can be told by, and JSON."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl.formulas import answers
from tests.formulas.frames import patients


def made(text: str, family: str = "gaussian") -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site")


def test_moments_are_those_of_all_rows_together() -> None:
    frame = patients()
    schema = hierfl.schema(frame, made("y ~ age * dose + scale(log(dose)) + (1 | site)"))
    assert schema.rows == len(frame)
    for name, values in (("age", frame["age"]), ("age:dose", frame["age"] * frame["dose"])):
        assert schema.design[name].mean == pytest.approx(values.mean())
        assert schema.design[name].sd == pytest.approx(values.std(ddof=0))
    constants = schema.transforms["scale(log(dose))"]
    assert constants.mean == pytest.approx(np.log(frame["dose"]).mean())
    assert constants.sd == pytest.approx(np.log(frame["dose"]).std(ddof=0))
    assert schema.response is not None
    assert schema.response.mean == pytest.approx(frame["y"].mean())


def test_moments_of_numbers_far_from_zero_are_right() -> None:
    frame = patients().assign(age=lambda f: f["age"] + 1e6)
    schema = hierfl.schema(frame, made("y ~ age"))
    assert schema.design["age"].sd == pytest.approx(frame["age"].std(ddof=0), rel=1e-3)


def test_a_frame_for_each_client_gives_the_same_schema_as_one_frame() -> None:
    frame = patients()
    apart = {str(name): part.drop(columns="site") for name, part in frame.groupby("site")}
    text = made("y ~ sex + scale(age) + (1 | site) + (1 | region)")
    assert hierfl.schema(apart, text).json() == hierfl.schema(frame, text).json()


@pytest.mark.parametrize(
    ("by", "level", "groups"),
    [
        ("region", "above", ("north", "south", "west")),
        ("year", "crossed", ("2020", "2021", "2022", "2023")),
        ("ward", "crossed", ("w0", "w1", "w2")),
        ("site:ward", "within", ()),
    ],
)
def test_how_groups_lie_to_the_clients(by: str, level: str, groups: tuple[str, ...]) -> None:
    schema = hierfl.schema(patients(), made(f"y ~ (1 | {by})"))
    assert schema.groups[by].level == level
    assert schema.groups[by].levels == groups


def test_groups_with_names_of_their_own_lie_within_clients_and_their_names_stay_there() -> None:
    frame = patients().assign(ward=lambda f: f["site"] + f["ward"])
    schema = hierfl.schema(frame, made("y ~ (1 | ward)"))
    assert schema.groups["ward"] == hierfl.formulas.Grouping("within", (), 3)
    assert "s0w0" not in schema.json()


def test_groups_too_small_to_be_named_are_refused_unless_agreed_beforehand() -> None:
    frame = patients(rows=8)  # two rows of each year at each site
    with pytest.raises(ValueError, match=r"site:year.*levels="):
        hierfl.schema(frame, made("y ~ (1 | year)"), min_count=5)
    years = {"year": [2020, 2021, 2022, 2023]}
    schema = hierfl.schema(frame, made("y ~ (1 | year)"), levels=years, min_count=5)
    assert schema.groups["year"].level == "crossed"
    assert hierfl.schema(frame, made("y ~ (1 | year)")).groups == schema.groups  # in one process
    with pytest.raises(ValueError, match="not among 2020, 2021"):
        hierfl.schema(frame, made("y ~ (1 | year)"), levels={"year": [2020, 2021]}, min_count=5)


def with_rare(rows: int) -> pd.DataFrame:
    """Return patients of whom `rows` at one site have a level that no other has."""
    frame = patients(rows=60)
    frame.loc[: rows - 1, "sex"] = "unknown"
    return frame


def test_rare_levels_do_not_leave_their_client() -> None:
    frame = with_rare(4)
    with pytest.raises(ValueError, match=r"'sex' of client 's0'.*5 rows"):
        hierfl.schema(frame, made("y ~ sex"), min_count=5)
    merged = hierfl.schema(frame, made("y ~ sex"), rare="merge", min_count=5)
    assert merged.columns["sex"].levels == ("f", "m", "x", "other")
    assert "unknown" not in merged.json()
    five = hierfl.schema(with_rare(5), made("y ~ sex"), min_count=5)
    assert five.columns["sex"].levels[-2] == "unknown"
    assert hierfl.schema(frame, made("y ~ sex")).columns == five.columns  # in one process


def test_levels_that_are_agreed_beforehand_are_told_by_nobody() -> None:
    frame = patients(rows=60)
    parts = {"y": None, "sex": None}
    told = answers.of_columns(frame, parts, "s0", 5, frozenset({"sex"}))(slice(None))
    assert told["sex"].counts == {}
    levels = {"sex": ["x", "m", "f"]}
    schema = hierfl.schema(frame, made("y ~ sex"), levels=levels)
    assert schema.columns["sex"].levels == ("x", "m", "f")  # the first is the reference


def test_answers_hold_counts_and_sums_of_no_fewer_rows_than_agreed() -> None:
    """Nothing that a client answers has the size of its rows, and no count of a level is below the least."""
    frame = patients(rows=40)
    told = answers.of_columns(frame, {"age": None, "sex": None}, "s0", 30, frozenset())(slice(None))
    assert told["age"].sums is not None and told["age"].sums.count == len(frame)
    assert all(n >= 30 for n in (told["sex"].counts or {}).values())
    for part in told.values():
        for field in fields(part):
            value: Any = getattr(part, field.name)
            assert np.ndim(value) == 0 or isinstance(value, dict | tuple)
    groups = answers.of_groups(frame, ("ward",), "site", "s0", 30)(slice(None))
    assert groups.distinct == 3 and all(n >= 30 for n in groups.counts.values())


def test_counts_of_quantiles_are_multiples_of_the_min_count() -> None:
    from hierfl.formulas.transforms import counted

    counts = counted(np.random.default_rng(0).normal(size=333), 0.0, 1.0, 5)
    assert all(n % 5 == 0 for n in counts)
    assert list(counts) == sorted(counts)


def test_json_is_read_back_and_can_be_compared(tmp_path: Path) -> None:
    text = made("y ~ sex + bs(age, df=4) + poly(dose, 2) + (1 | region)")
    schema = hierfl.schema(patients(), text, units={"age": "years"})
    schema.save(tmp_path / "schema.json")
    assert hierfl.Schema.load(tmp_path / "schema.json") == schema
    assert json.loads(schema.json())["columns"]["age"]["unit"] == "years"
    schema.save(tmp_path / "schema.json")  # the same text
    other = hierfl.schema(patients(seed=1), text)
    with pytest.raises(FileExistsError, match="another text"):
        other.save(tmp_path / "schema.json")


def test_units_must_agree() -> None:
    whole = patients()
    frames = {f"s{k}": whole[k::3].reset_index().assign(site=f"s{k}") for k in range(3)}
    for frame in frames.values():
        frame.attrs["units"] = {"age": "years"}
    schema = hierfl.schema(frames, made("y ~ age"))
    assert schema.columns["age"].unit == "years"
    frames["s1"].attrs["units"] = {"age": "months"}
    with pytest.raises(ValueError, match="'age' is in years at 's0' and in months at 's1'"):
        hierfl.schema(frames, made("y ~ age"))
    formula = hierfl.formula("y ~ age", clients="site", schema=schema)
    with pytest.raises(ValueError, match="'age' of client 's1' is in months"):
        formula.data(frames)


def test_a_schema_of_columns_alone_serves_several_formulas() -> None:
    frame = patients(rows=60)
    columns = hierfl.schema(
        frame.drop(columns=["grade"]), clients="site", levels={"sex": ["m", "f", "x"]}
    )
    assert columns.formula == "" and "site" not in columns.columns
    ready = hierfl.formula("y ~ sex + (1 | site)", clients="site", schema=columns).on(frame)
    assert ready.layout.common.columns == ("sex[f]", "sex[x]")


@pytest.mark.parametrize(
    "text",
    [
        "y ~ age * sex + beds + (1 + age | site) + (1 | region) + (1 | year)",
        "y ~ s(dose, k=5) + bs(age, df=4) + poly(age, 2) + (1 | site/ward)",
        "wins | trials(n) ~ mo(grade) + scale(age) + offset(dose)",
    ],
)
def test_rows_read_together_are_those_of_clients(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = patients().sample(frac=1.0, random_state=0)
    apart = {str(site): frame for site, frame in whole.groupby("site")}
    family = "binomial" if "trials" in text else "gaussian"
    together = hierfl.formula(text, family, clients="site").on(whole)
    rows = together.data(whole)
    monkeypatch.setattr("hierfl.formulas.questions._has_one_source", lambda frames: False)
    alone = hierfl.formula(text, family, clients="site").on(apart)
    assert together.agreed == alone.agreed
    one_by_one = alone.data(apart)
    assert rows.names == one_by_one.names and torch.equal(rows.offsets, one_by_one.offsets)
    for kind in ("fields", "client_fields"):
        ours, theirs = getattr(rows, kind), getattr(one_by_one, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    moved = whole.assign(age=whole["age"].where(whole["site"] != "s3", np.inf))
    with pytest.raises(ValueError, match="'age' of client 's3' is infinite in row 0"):
        together.data(moved)
