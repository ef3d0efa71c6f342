"""Table 1, beside pandas on all rows together."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.engine.federation import cohort_size
from hierfl.formulas.table_answers import (
    FEW,
    LevelsAnswer,
    NumbersAnswer,
    cumulative,
    rounded_count,
    table_answer,
)


def patients(rows: int = 600, seed: int = 0) -> pd.DataFrame:
    g = np.random.default_rng(seed)
    found = pd.DataFrame(
        {
            "hospital": g.choice(["north", "south", "west"], rows, p=[0.5, 0.3, 0.2]),
            "arm": g.choice(["new", "old"], rows),
            "age": g.normal(60.0, 9.0, rows).round(1),
            "stage": pd.Categorical(g.choice(["I", "II", "III"], rows), ["I", "II", "III"]),
            "dose": g.exponential(3.0, rows),
        }
    )
    found.loc[g.random(rows) < 0.1, "dose"] = np.nan
    return found


def line(found: Any, variable: str, group: str, level: str = "") -> Any:
    """Return one row of the frame."""
    of = found.frame
    at = (of["variable"] == variable) & (of["group"] == group) & (of["level"] == level)
    (only,) = of[at].itertuples()
    return only


@pytest.mark.parametrize("by", [None, "arm", "hospital"])
def test_frames_in_one_process_are_described_as_pandas_does(by: str | None) -> None:
    whole = patients()
    parts = {str(name): part for name, part in whole.groupby("hospital")}
    groups = {"all": whole} | ({} if by is None else {str(k): v for k, v in whole.groupby(by)})
    for rows in (whole, parts):
        found = hierfl.describe(rows, by=by, columns=["age", "stage", "dose"])
        assert set(found.frame["group"]) == set(groups) and not found.left_out
        for name, part in groups.items():
            for column in ("age", "dose"):
                one, of = line(found, column, name), part[column]
                want = [
                    of.count(),
                    of.mean(),
                    of.std(),
                    of.isna().sum(),
                    *of.quantile([0.25, 0.5, 0.75]),
                ]
                got = [one.n, one.mean, one.sd, one.missing, one.q25, one.median, one.q75]
                np.testing.assert_allclose(got, want, rtol=1e-12)
                assert one.median_low == one.median == one.median_high
            for level, count in part["stage"].value_counts().items():
                one = line(found, "stage", name, str(level))
                assert one.count == count and one.share == count / len(part)
    assert found.table.index[0] == "rows" and "stage: II, n (%)" in found.table.index
    assert "dose, missing" in found.table.index and "age, missing" not in found.table.index


def test_no_number_rests_on_few_rows() -> None:
    frame = pd.DataFrame(
        {
            "sex": ["f"] * 3 + ["m"] * 97,
            "ill": [1.0] * 4 + [0.0] * 96,  # four rows differ: their sum could be solved for
            "dose": [np.nan] * 2 + list(np.arange(98.0)),
            "age": np.arange(100.0),
        }
    )
    found = table_answer(frame, ["sex", "ill", "dose", "age"], None, "north", 5)
    parts = found.groups[""]
    sex, dose = parts["sex"].found, parts["dose"]
    assert isinstance(sex, LevelsAnswer) and sex.counts == {"m": 95} and sex.others == FEW
    assert parts["ill"].found is None and dose.missing == FEW
    assert (
        isinstance(dose.found, NumbersAnswer) and dose.found.rows == 100 and dose.found.mean == 48.5
    )
    small = table_answer(frame, ["age"], "sex", "north", 5)
    assert set(small.groups) == {"m"} and small.left == FEW
    for one in (parts["age"].found, dose.found):
        assert isinstance(one, NumbersAnswer)
        assert not {*one.ends} & {0.0, 97.0, 99.0} and all(n % 5 == 0 for n in one.below)


def test_sums_do_not_differ_from_the_schemas_by_few_rows() -> None:
    """A schema reveals sums of complete rows; those of three more rows would reveal the three."""
    age = np.arange(50.0)
    frame = pd.DataFrame({"age": age, "dose": np.where(age < 3, np.nan, 1.0 + age)})
    whole = frame.notna().all(axis=1).to_numpy()
    found = table_answer(frame, ["age"], None, "north", 5, whole).groups[""]["age"].found
    assert isinstance(found, NumbersAnswer) and found.mean == age[3:].mean()
    frame.loc[:20, "dose"] = np.nan
    whole = frame.notna().all(axis=1).to_numpy()
    found = table_answer(frame, ["age"], None, "north", 5, whole).groups[""]["age"].found
    assert isinstance(found, NumbersAnswer) and found.mean == age.mean()


def test_a_group_named_all_is_not_taken_for_all_rows() -> None:
    frame = pd.DataFrame({"part": ["all"] * 2 + ["some"] * 3, "age": [1.0, 3.0, 5.0, 7.0, 9.0]})
    found = hierfl.describe(frame, by="part")
    assert list(found.table) == ["all", "some", "(all)"]
    assert [line(found, "age", name).mean for name in found.table] == [2.0, 7.0, 5.0]


def test_clients_of_frames_by_name_are_groups() -> None:
    rows = {"a": pd.DataFrame({"x": [1.0, 2.0]}), "b": pd.DataFrame({"x": [4.0]})}
    found = hierfl.describe(rows, by="client", columns=["x", "x"])
    assert [line(found, "x", name).mean for name in ("a", "b")] == [1.5, 4.0]


def test_rows_that_are_all_but_a_few_are_not_told_by_group() -> None:
    """The sums over all rows were told before: less those of one group they are those of the other."""
    age = np.arange(40.0)
    sex = pd.Series(["f"] * 20 + ["m"] * 18 + ["x"] * 2)
    frame = pd.DataFrame({"age": age, "sex": sex})
    told = table_answer(frame, ["age"], "sex", "north", 5)
    assert [told.groups[sex]["age"].found is None for sex in "fm"] == [False, True]
    assert told.left == FEW and set(told.rows) == {"f", "m"}
    some = frame.assign(age=np.where((sex == "x") | (age < 17), np.nan, age), dose=1.0)
    told = table_answer(some, ["age", "dose"], "sex", "north", 5)
    assert told.groups["m"]["age"].found is None  # of three rows of "f" there are ages
    few = frame.assign(ill=(age < 2) * 1.0)[:38]  # two of "f" are ill, which nobody is told of "f"
    told = table_answer(few, ["ill"], "sex", "north", 5)
    assert [told.groups[sex]["ill"].found for sex in "fm"] == [None, None]
    enough = table_answer(frame.replace({"x": "m"}), ["age"], "sex", "north", 5)
    assert all(enough.groups[sex]["age"].found is not None for sex in "fm")


def test_ranges_hold_enough_values_and_show_no_end() -> None:
    g = np.random.default_rng(1)
    some: Any = (g.normal(size=200), g.exponential(size=60), g.integers(0, 3, 90) * 1.0)
    for values in some:
        ends, below = cumulative(values, 7)
        held = np.diff([0, *((values <= end).sum() for end in ends), len(values)])
        assert (held >= 7).all() and values.max() > ends[-1]
        for end, count in zip(ends, below, strict=True):
            assert abs((values <= end).sum() - count) <= 3.5 and count % 7 == 0


@pytest.mark.parametrize("least", [2, 5, 11])
def test_bounds_hold_the_quantiles_and_means_are_near(least: int) -> None:
    for seed in range(8):
        whole = patients(300, seed)
        rows = {str(name): part for name, part in whole.groupby("hospital")}
        found = hierfl.describe(rows, columns=["age", "dose"], least_count=least)
        for column in ("age", "dose"):
            one, of = line(found, column, "all"), whole[column].dropna()
            # the few largest values count as the nearest others
            assert abs(one.mean - of.mean()) < 0.1 * of.std() and abs(one.sd / of.std() - 1) < 0.25
            for name, share in (("q25", 0.25), ("median", 0.5), ("q75", 0.75)):
                at = np.quantile(of, share, method="inverted_cdf")
                low, high = getattr(one, f"{name}_low"), getattr(one, f"{name}_high")
                assert low <= at <= high
                middle = getattr(one, name)
                assert low <= middle <= high or (math.isnan(middle) and math.isinf(high - low))
                wide = np.mean((of > low) & (of <= high))
                assert wide < 0.2 + 0.04 * least, (name, low, high)


def test_counts_are_rounded_and_few_are_hidden() -> None:
    assert [rounded_count(n, 5) for n in (0, 1, 4, 5, 7, 8, 1003)] == [0, FEW, FEW, 5, 5, 10, 1005]
    found = hierfl.describe(patients(400), by="arm", columns=["stage"], least_count=20)
    assert "Counts are to the nearest 20" in found.note
    assert (found.frame["count"] % 20 == 0).all()


def test_numbers_of_numpy_are_numbers() -> None:
    """Arguments that are integers or shares may be NumPy's, here and in other rooms."""
    few: Any = np.int64(20)
    plain, of_numpy = (
        hierfl.describe(patients(400), by="arm", columns=["stage"], least_count=n)
        for n in (20, few)
    )
    pd.testing.assert_frame_equal(plain.frame, of_numpy.frame)
    frame = pd.DataFrame({"h": list("abc") * 20, "x": range(60)})
    agreed = hierfl.schema(frame, clients="h", min_count=few)
    assert agreed.min_count == 20 and '"min_count": 20' in agreed.json()
    half: Any = np.float32(0.5)
    policy = hierfl.nodes.Policy(min_rows=few, epsilon=half, delta=1e-5)
    assert json.dumps(policy.said()) == '{"min_rows": 20, "epsilon": 0.5, "delta": 1e-05}'
    assert cohort_size(half, 8) == 4 and cohort_size(few, 80) == 20


def test_what_clients_leave_out_is_said() -> None:
    rows = {"a": pd.DataFrame({"x": [0.0] * 50}), "b": pd.DataFrame({"x": [0.0] * 48 + [1.0, 2.0]})}
    found = hierfl.describe(rows, columns=["x"], least_count=5)
    assert found.table.loc["x, mean (sd)", "all"] == "0 (0) of 50" and "'Of N'" in found.note
    assert math.isnan(line(found, "x", "all").share)


# ------------------------------------------------------------ what a column is
def columns_of_each_kind(n: int = 200) -> pd.DataFrame:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"arm": np.resize(["a", "b"], n), "died": g.integers(0, 2, n)})
    frame["id"] = [f"p{i}" for i in range(n)]
    frame["day"] = pd.date_range("2020-01-01", periods=n)
    frame["wave"] = pd.to_datetime(np.resize(["2020-01-01", "2020-01-01", "2021-01-01"], n))
    stage = pd.Categorical(np.resize(["II", "III"], n), ["I", "III", "II"], ordered=True)
    return frame.assign(stage=stage, age=g.normal(60.0, 9.0, n))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_levels_come_in_their_order_with_those_that_have_no_rows(is_ordered: bool) -> None:
    """Pooled from clients and groups each of which lacks some, as pandas' crosstab has them."""
    frame = columns_of_each_kind()
    frame["stage"] = frame["stage"].cat.set_categories(["I", "III", "II"], ordered=is_ordered)
    by_client = {"x": frame[frame["arm"] == "a"], "y": frame[frame["arm"] == "b"]}
    for rows, by in ((frame, "arm"), (by_client, "client"), (by_client, "arm")):
        found = hierfl.describe(rows, by=by, columns=["stage"])
        names = [label.split(": ")[1].split(",")[0] for label in found.table.index[1:]]
        assert names == ["I", "III", "II"]
        first = {"a": "a", "b": "b"} if by == "arm" else {"a": "x", "b": "y"}
        assert found.table.loc["stage: I, n (%)"].tolist() == ["0 (0%)"] * 3
        assert found.table.loc["stage: II, n (%)", first["b"]] == "0 (0%)"
        assert line(found, "stage", first["b"], level="II").count == 0
    apart = hierfl.describe(frame, by="arm", columns=["stage"], least_count=5)
    assert apart.table.loc["stage: II, n (%)", "b"] == "0 (0%)"


def test_zeros_and_ones_are_counted() -> None:
    frame = columns_of_each_kind()
    ones = int(frame["died"].sum())
    found = hierfl.describe(frame, columns=["died"])
    assert found.table.loc["died: 1, n (%)", "all"] == f"{ones} ({ones / 2:.0f}%)"
    assert line(found, "died", "all", level="0").count == 200 - ones
    # numbers of which one client has 0 and 1 alone are numbers
    rows = {"x": frame, "y": frame.assign(died=np.arange(200) % 3)}
    assert "died, mean (sd)" in hierfl.describe(rows, columns=["died"]).table.index


def test_ids_and_dates_are_named_and_counted() -> None:
    frame = columns_of_each_kind()
    found = hierfl.describe(frame, by="arm")
    for name in ("id", "day"):
        assert found.table.loc[f"{name}, different values"].tolist() == ["100", "100", "200"]
        assert [label for label in found.table.index if label.startswith(f"{name}:")] == []
    assert "as IDs and dates are: id, day." in found.note
    assert "wave: 2021-01-01, n (%)" in found.table.index and len(found.table) < 16
    assert "age, mean (sd)" in found.table.index


def test_zeros_alone_are_a_level() -> None:
    found = hierfl.describe(pd.DataFrame({"died": [0] * 40}))
    assert found.table.loc["died: 1, n (%)", "all"] == "0 (0%)"


def test_groups_are_in_the_order_of_their_category() -> None:
    stages = pd.CategoricalDtype(["low", "mid", "none", "high"], ordered=True)
    high = pd.DataFrame({"stage": pd.Series(["high", "low", None], dtype=stages), "x": 1.0})
    mid = pd.DataFrame({"stage": pd.Series(["mid", "mid"], dtype=stages), "x": 2.0})
    found = hierfl.describe({"a": high, "b": mid}, by="stage")
    assert [*found.table] == ["low", "mid", "high", "(missing)", "all"]


HALF: Any = 2.5
WRONG: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "least_count is 0: it must be": (ValueError, lambda: hierfl.describe(patients(), least_count=0)),
    "has no column 'weight'": (KeyError, lambda: hierfl.describe(patients(), columns=["weight"])),
    "the frame has no column 'x'": (KeyError, lambda: hierfl.describe(patients(), by="x")),
    "client 'a' has no column 'x'": (KeyError, lambda: hierfl.describe({"a": patients()}, by="x")),
    "columns is 'age': give a list": (TypeError, lambda: hierfl.describe(patients(), columns="age")),
    "the name of a column is 0: rename it": (TypeError, lambda: hierfl.describe(pd.DataFrame([[1.0], [2.0]]))),
    "holds numbers at one client and names at another": (
        ValueError,
        lambda: hierfl.describe({"a": pd.DataFrame({"x": [1.0, 2.0]}), "b": pd.DataFrame({"x": ["u", "v"]})})
    ),
    "least_count is 2.5: it must be an integer": (TypeError, lambda: hierfl.describe(patients(), least_count=HALF)),
    r"column 'x' of client 'b' has the value '\(missing\)', .*: rename it": (
        ValueError,
        lambda: hierfl.describe(
            {"a": pd.DataFrame({"x": ["u", None]}), "b": pd.DataFrame({"x": ["(missing)", "u"]})},
            by="x",
        ),
    ),
    r"column 'x' has the value '\(others\)', .*: rename it": (
        ValueError, lambda: hierfl.describe(pd.DataFrame({"x": ["(others)", "u", "u"]}), least_count=2)
    ),
    "nothing may leave": (ValueError, lambda: hierfl.describe(patients(9), least_count=50)),
    "rows is a list": (TypeError, lambda: hierfl.describe([1])),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_described_is_refused_by_name(words: str) -> None:
    error, call = WRONG[words]
    with pytest.raises(error, match=words):
        call()
