"""No whole-number combination of a node's answers is of a few rows, whatever columns, runs and times they are of."""

from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl.nodes.account import BrokenLedger, Entry, Ledger
from hierfl.nodes.policy import Forbidden
from hierfl.nodes.row_sets import RowCodes, check_rows, rows_of_data, rows_of_frame

WHY = "fewer than 5 rows have changed"


def frame(count: int, seed: int) -> pd.DataFrame:
    g = np.random.default_rng(seed)
    columns = {
        "age": g.integers(30, 90, count),
        "bmi": g.normal(27.0, 4.0, count).round(1),
        "sex": g.choice(["f", "m"], count),
        "ill": g.integers(0, 2, count),
        "time": g.exponential(5.0, count).round(2) + 0.1,
    }
    return pd.DataFrame(columns)


def joined(*frames: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


A, B, X, MORE = frame(200, 0), frame(150, 1), frame(1, 2), frame(10, 3)
COARSE, FIRST = ["sex", "ill"], ["age", "ill"]


def corrected(count: int, of: pd.DataFrame = A) -> pd.DataFrame:
    return of.assign(bmi=np.r_[np.arange(90.0, 90.0 + count), of["bmi"][count:]])


# name -> answers one after the other, and whether each leaves
STEPS: dict[str, tuple[list[pd.DataFrame], str]] = {
    "one row more": ([A, joined(A, X)], "10"),
    "one row fewer": ([A, A[1:]], "10"),
    "the same rows in another order": ([A, A[::-1]], "11"),
    "one value": ([A, corrected(1)], "10"),
    "four values": ([A, corrected(4)], "10"),
    "five values, and four of them back": ([A, corrected(5), corrected(1)], "110"),
    "a tiny change": ([A, A.assign(time=A["time"] + np.eye(1, 200)[0] * 1e-12)], "10"),
    "three rows for three": ([A, joined(A[3:], MORE[:3])], "10"),
    "five rows for five": ([A, joined(A[5:], MORE[:5])], "11"),
    "up by ten, then one of them": ([A, joined(A, MORE), joined(A, MORE[:1])], "110"),
    "five more, then one more": ([A, joined(A, MORE[:5]), joined(A, MORE[:6])], "110"),
    "five more, then five more": ([A, joined(A, MORE[:5]), joined(A, MORE)], "111"),
    "five more but one, then not": ([A, joined(A[1:], MORE[:5]), A[1:]], "110"),
    "twice": ([A, joined(A, A)], "11"),
    "twice and a row": ([A, joined(A, A, X)], "10"),
    "two sets, then their union": ([A, B, joined(A, B)], "111"),
    "their union and a row": ([A, B, joined(A, B, X)], "110"),
    "three sets in pairs, then all and a row": (
        [joined(A, B), joined(A, MORE), joined(B, MORE), joined(A, B, MORE, X)],
        "1110",
    ),
    "a column more": ([A[FIRST], A], "11"),
    "a column and a row more": ([A[FIRST], joined(A, X)], "10"),
    "one column in common": ([A[FIRST], joined(A, X)[["age", "bmi"]]], "10"),
    "no column in common, then both": ([A[FIRST], joined(A, X)[["bmi", "sex"]], A], "110"),
    "in single precision": ([A, joined(A, X).astype({"bmi": "float32", "age": "float32"})], "10"),
    "as texts": ([A.assign(ill=A["ill"].astype(str)), joined(A, X)], "10"),
    "as categories": ([A.assign(sex=A["sex"].astype("category")), joined(A, X)], "10"),
    "as truths": ([A.assign(ill=A["ill"] == 1), joined(A, X)], "10"),
    "many equal rows, one more": ([A[COARSE], joined(A, X)[COARSE]], "10"),
    "a constant column in common": ([A[["age"]].assign(k=1), B[["bmi"]][:148].assign(k=1)], "11"),
    "an empty value": ([A, A.assign(bmi=np.r_[np.nan, A["bmi"][1:]])], "10"),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_combination_of_answers_is_of_a_few_rows(name: str, tmp_path: Path) -> None:
    frames, expected = STEPS[name]
    left = ""
    for k, of in enumerate(frames):
        ledger = Ledger.at(tmp_path)
        try:
            new = check_rows(ledger, [rows_of_frame(of, list(of), ledger.key)], 5)
        except Forbidden as error:
            assert WHY in str(error)
            left += "0"
            continue
        ledger.append(Entry("schema", str(k), rows=new))
        left += "1"
    assert left == expected


def test_growth_by_a_few_rows_at_a_time_goes_on(tmp_path: Path) -> None:
    """Also of columns in which most rows are equal; and a set within it that lacks two of the last is refused."""
    ledger, every = Ledger.at(tmp_path), frame(400, 7)
    for count in range(200, 330, 10):
        for columns in (list(every), COARSE):
            rows = rows_of_frame(every[:count], columns, ledger.key)
            ledger.append(Entry("round", str(count), rows=check_rows(ledger, [rows], 5)))
    with pytest.raises(Forbidden, match=WHY):
        check_rows(ledger, [rows_of_frame(every[:318], list(every), ledger.key)], 5)


def test_groups_leave_no_small_group_between_them(tmp_path: Path) -> None:
    """Sums by ward, of all wards but one of three rows, less those of all rows."""
    ledger, of = Ledger.at(tmp_path), A.assign(ward=[*"ccc", *"ab" * 98, "a"])
    by_ward = rows_of_frame(of, ["bmi"], ledger.key, ["ward"])
    large = [by_ward.where((of["ward"] == ward).to_numpy()) for ward in "ab"]
    ledger.append(Entry("table", "1", rows=check_rows(ledger, large, 5)))
    with pytest.raises(Forbidden, match=WHY):
        check_rows(ledger, [rows_of_frame(of, ["bmi", "ward"], ledger.key)], 5)
    other = rows_of_frame(of[:-10], ["age"], ledger.key, ["ward"])
    check_rows(ledger, [other], 5)  # nothing of age has left


def test_codes_of_tensors_are_those_of_their_columns(tmp_path: Path) -> None:
    key = Ledger.at(tmp_path).key
    x = torch.tensor(A[["age", "bmi"]].to_numpy(), dtype=torch.float32)
    own: dict[str, Any] = {"x": x, "ill": torch.tensor(A["ill"].to_numpy())}
    data = hierfl.ClientData.from_arrays(["a"] * 200, features={"x": ("age", "bmi")}, **own)
    of_data, of_frame = rows_of_data(data, ["x", "ill"], key), rows_of_frame(A, list(A), key)
    assert set(of_data.every) == {"age", "bmi", "ill"}
    for name, codes in of_data.every.items():
        assert (codes >> np.uint64(32) == of_frame.every[name] >> np.uint64(32)).all(), name
    assert len(np.unique(of_frame.every["age"])) == A["age"].nunique()
    other = rows_of_frame(A, list(A), b"0" * 32)
    assert not np.isin(other.every["age"], of_frame.every["age"]).any()


@pytest.mark.parametrize("change", ["gone", "edited"])
def test_codes_that_are_lost_stop_the_node(change: str, tmp_path: Path) -> None:
    ledger = Ledger.at(tmp_path)
    rows = rows_of_frame(A, list(A), ledger.key)
    ledger.append(Entry("round", "1", rows=check_rows(ledger, [rows], 5)))
    for path in (tmp_path / "rows").iterdir():
        assert path.stat().st_mode & 0o077 == 0
        path.unlink() if change == "gone" else path.write_bytes(bytes(1600))
    with pytest.raises(BrokenLedger, match="rows/"):
        check_rows(ledger, [rows_of_frame(B, list(B), ledger.key)], 5)


@pytest.mark.slow
def test_a_million_rows_are_compared_in_about_a_second(tmp_path: Path) -> None:
    ledger, large = Ledger.at(tmp_path), frame(1_000_000, 5)
    started = process_time()
    for of in (large, joined(large, MORE)):
        rows = RowCodes(rows_of_frame(of, ["age", "bmi", "sex"], ledger.key).every)
        ledger.append(Entry("round", "1", rows=check_rows(ledger, [rows], 5)))
    assert process_time() - started < 10.0  # 1.3 s on a quiet core
