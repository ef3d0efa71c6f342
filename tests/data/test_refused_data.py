"""Data that would be merged, wrapped or unmasked in silence are refused by name, with the fix."""

import re
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import ClientData, partition

Y = [1.0, 2.0, 3.0]
NO_NAMES: Any = [None, "a"]
NO_FIELDS: Any = {"a": Y}
MASKED: Any = np.ma.array(Y, mask=[False, True, False])


def rows(ids: Any, **fields: Any) -> Callable[[], ClientData]:
    return lambda: ClientData.from_arrays(ids, **(fields or {"y": Y}))


def direct(offsets: Any, names: Any = ("a", "b"), y: Any = None) -> Callable[[], ClientData]:
    field = torch.ones(4) if y is None else y
    return lambda: ClientData({"y": field}, offsets, names)


def half(**changes: Any) -> Callable[[], object]:
    data = ClientData.from_arrays([0, 1, 1], y=Y)
    ((name, value),) = changes.items()
    return lambda: getattr(data, name)(value)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "NaN": (rows(np.array([np.nan] * 3, object)), "client_id is nan in row 0: client_id must be"),
    "None": (rows(["a", None, "a"]), "client_id is None in row 1"),
    "pandas NA": (rows(pd.array(["a", None, "b"], dtype="string")), "client_id is <NA> in row 1"),
    "no date": (rows(np.array(["2020-01-01", "NaT", "NaT"], "datetime64[D]")), "client_id is NaT in row 1"),
    "NaN as text": (rows(["a", "nan", "b"]), "a client is named 'nan', the word for a missing value: leave"),
    "None among names": (lambda: ClientData.from_arrays([0, 1, 1], names=NO_NAMES, y=Y), "is named 'None'"),
    "1 and '1'": (rows([1, "1", "2"]), "client_id holds mixed-integer values: client_id must be integers or strings"),
    "1 and True": (rows([1, True, 0]), "client_id holds mixed-integer values"),
    "NUL": (rows(["a", "a\0", "b"]), r"client 'a\x00' has a control character"),
    "a line": (rows(["a\nb", "a", "b"]), r"client 'a\nb' has a control character"),
    "half a pair": (rows(["\ud800", "a", "b"]), "an incomplete character in its name: rename it"),
    "a space": (rows(["a", "a ", "b"]), "clients 'a' and 'a ' differ only in case, spaces, .0 or Unicode form: make"),
    "two spaces": (rows(["a b", "a  b", "b"]), "clients 'a  b' and 'a b' differ only in case, spaces"),
    "two forms": (
        rows(["é", unicodedata.normalize("NFD", "é"), "b"]), "differ only in case, spaces, .0 or Unicode form"
    ),
    "a byte-order mark": (rows(["a", "\ufeffa", "b"]), "differ only in case, spaces, .0 or Unicode form"),
    "empty": (rows(["", "a", "b"]), "a client has an empty name: name it"),
    "bytes": (rows([b"a", b"b", b"a"]), "client_id holds bytes values: client_id must be"),
    "masked ids": (rows(np.ma.array([0, 1, 1], mask=[False, True, False])), "client_id has 1 masked rows: leave"),
    "a number": (rows(5), "client_id has shape (): give one id per row"),
    "no rows": (rows([], y=[]), "client_id has no rows: give at least one row"),
    "one string of names": (
        lambda: ClientData.from_arrays([0, 1, 1], names="ab", y=Y), "`names` is the string 'ab': give a list"
    ),
    "another index": (
        rows(pd.Series([0, 1, 1], index=[2, 1, 0]), y=pd.Series(Y)),
        "field 'y' and client_id are pandas columns with different indices: take both from one frame"
    ),
    # fields
    "masked": (rows([0, 1, 1], y=MASKED), "field 'y' has 1 masked values: fill them"),
    "rows masked": (rows([0, 1, 1], y=[MASKED] * 3), "field 'y' has 3 masked values"),
    "uint64": (
        rows([0, 1, 1], y=np.array([1, 2, 2**63 + 5], np.uint64)), "field 'y' holds 9223372036854775813, beyond"
    ),
    "uint64 of torch": (
        rows([0, 1, 1], y=torch.tensor([1, 2, 2**63 + 5], dtype=torch.uint64)), "field 'y' holds 9223372036854775813"
    ),
    "integers that NumPy makes floats": (
        rows([0, 1, 1], y=[2**63 + 1, 2, 3]), "field 'y' holds 9223372036854775809"
    ),
    "requires_grad": (rows([0, 1, 1], y=torch.tensor(Y, requires_grad=True)), "field 'y' is not a dense tensor"),
    "sparse": (rows([0, 1, 1], y=torch.eye(3).to_sparse()), "field 'y' is not a dense tensor of values"),
    "without data": (rows([0, 1, 1], y=torch.ones(3, device="meta")), "field 'y' is not a dense tensor of values"),
    "dates": (rows([0, 1, 1], y=np.array(["2020-01-01"] * 3, "datetime64[D]")), "not numeric, but datetime64[D]: give"),
    "words": (
        rows([0, 1, 1], y=["u", "v", "u"]), "give numbers, or read strings with ClientData.from_frame"
    ),
    "ragged": (rows([0, 1, 1], y=[[1], [1, 2], [3]]), "give every row the same shape"),
    "no columns": (rows([0, 1, 1], x=np.zeros((3, 0))), "field 'x' has shape (3, 0), no columns: leave it out"),
    "nothing": (rows([0, 1, 1], y=None), "field 'y' is a single number: give one value per row"),
    "booleans and numbers": (
        lambda: ClientData.from_clients({"a": {"y": [True]}, "b": {"y": [5]}}),
        "client 'b': 'y' is int64, but the first client's is bool: give both as numbers"
    ),
    "a frame of clients": (lambda: ClientData.from_clients(pd.DataFrame({"y": Y})), "clients is a DataFrame: give"),
    "a list for a client": (
        lambda: ClientData.from_clients(NO_FIELDS), "give {name: {field: values}}"
    ),
    # parts
    "offsets that skip": (direct(torch.tensor([1, 2, 4])), "offsets do not fit 2 names"),
    "floating offsets": (
        direct(torch.tensor([0.0, 2.0, 4.0])), "offsets do not fit"
    ),
    "a list of offsets": (direct([0, 2, 4]), "offsets do not fit"),
    "no clients": (direct(torch.tensor([0]), (), torch.ones(0)), "there are no clients: give at least one row"),
    "an array": (direct(torch.tensor([0, 2, 4]), y=np.ones(4)), "field 'y' is a ndarray: give a tensor"),
    "a gradient": (direct(torch.tensor([0, 2, 4]), y=torch.ones(4, requires_grad=True)), "values without a gradient"),
    "a name that is a number": (
        direct(torch.tensor([0, 2, 4]), (1, "b")), "a client is named 1: names must be strings"
    ),
    "features of one string": (
        lambda: ClientData.from_arrays([0, 1], x=np.ones((2, 2)), features={"x": "ab"}),
        "the features of 'x' are the string 'ab': give a list of names"
    ),
    "two features of one name": (
        lambda: ClientData.from_arrays([0, 1], x=np.ones((2, 2)), features={"x": ["a", "a"]}),
        "features name two columns of 'x' 'a': give each column its own name"
    ),
    # selections
    "a mask of numbers": (
        half(where=torch.tensor([1.0, 0.0, 1.0])), "keep is float32 (3,): give a condition on each of the 3 rows"
    ),
    "a mask of positions": (half(where=torch.tensor([0, 1, 2])), "keep is int64 (3,): give a condition"),
    "no row kept": (half(where=torch.zeros(3, dtype=torch.bool)), "no row is kept: a federation needs"),
    "no client chosen": (half(select=[]), "no clients were chosen: give at least one"),
    "letters of a name": (half(select="01"), "the clients are given as '01': give a list, ['01']"),
    "only single rows": (
        lambda: ClientData.from_arrays([0, 1], y=Y[:2]).split(0.5, seed=0),
        "every client has a single row, so a split"
    ),
    "fields as a string": (
        lambda: hierfl.standardize(ClientData.from_arrays([0], x=[1.0]), fields="x"),
        "fields is the string 'x': give a list"
    ),
    # partitions
    "nobody gets a row": (
        lambda: partition.to_clients(torch.tensor([-1, -1]), y=Y[:2]), "a client is 0 or more"
    ),
    "below -1": (lambda: partition.to_clients(torch.tensor([0, -2]), y=Y[:2]), "a client is 0 or more"),
    "masked rows to deal": (
        lambda: partition.to_clients(torch.tensor([0, 1, 1]), y=MASKED), "'y' has 1 masked values"
    ),
    "masked labels": (
        lambda: partition.label_skew(np.ma.array([0, 1], mask=[True, False]), num_clients=1, share=1.0, seed=0),
        "masked in some rows"
    ),
    "missing labels": (
        lambda: partition.label_skew(np.array(["a", None], object), num_clients=1, share=1.0, seed=0),
        "or strings, none missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case: str) -> None:
    make, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "values",
    [
        np.array(Y, ">f8"),
        np.array(Y, object),
        np.array(Y, np.longdouble),
        np.ma.array(Y, mask=False),
        np.repeat(Y, 2)[::-2][::-1],
        [torch.tensor(v) for v in Y],
    ],
    ids=["byte order", "objects", "long", "unmasked", "strides", "tensors"],
)
def test_the_same_numbers_in_another_form_are_taken(values: Any) -> None:
    assert ClientData.from_arrays([0, 1, 1], y=values).fields["y"].tolist() == Y


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA])
def test_a_missing_number_becomes_nan(gap: object) -> None:
    y = ClientData.from_arrays([0, 1, 1], y=np.array([1, gap, True], object)).fields["y"]
    assert y.isnan().tolist() == [False, True, False]
    assert y[[0, 2]].tolist() == [1.0, 1.0]


def test_large_unsigned_ids_stay_apart() -> None:
    data = ClientData.from_arrays([2**63 + 1, 2, 2**63 + 2], y=Y)
    assert data.names == ("2", "9223372036854775809", "9223372036854775810")
    assert data.fields["y"].tolist() == [2.0, 1.0, 3.0]


def test_arrays_that_change_later_do_not_change_the_data() -> None:
    height, more = torch.ones(2), torch.zeros(3)
    data = ClientData.from_arrays([0, 1, 1], y=Y, client_fields={"height": height})
    data = data.with_fields(more=more)
    height[:], more[:] = 9.0, 9.0
    assert data.client_fields["height"].tolist() == [1.0, 1.0]
    assert data.fields["more"].tolist() == [0.0, 0.0, 0.0]


# ------------------------------------------------------------------ float64 numbers as float32
def test_what_float32_cannot_hold_is_refused() -> None:
    torch.set_default_dtype(torch.float32)
    with pytest.raises(ValueError, match=r"field 'y' holds 1e\+300, beyond the range of float32:"):
        ClientData.from_arrays([0, 1, 1], y=[1e300, 1.0, 2.0])
    with pytest.raises(ValueError, match=r"field 'y' varies by 1 about 1\.7e\+09, which float32"):
        ClientData.from_arrays([0, 1, 1], y=[1.7e9 - 1, 1.7e9, 1.7e9 + 1])
    x = np.stack([Y, [5e7, 5e7 + 0.5, np.nan], [5e7, 5e7 + 0.5, 5e7]], 1)
    with pytest.raises(ValueError, match=r"column 1 of field 'x' varies by 0\.354"):
        ClientData.from_arrays([0, 1, 1], x=x)


@pytest.mark.parametrize(
    "values",
    [[90_000.5, 70_000.0, 110_000.0], [0.1, 0.1, 0.1], [2000.0, 2001.0, 2002.0], [1e-60, 1.0, 2.0]],
)
def test_what_float32_tells_apart_is_taken(values: list[float]) -> None:
    torch.set_default_dtype(torch.float32)
    y = ClientData.from_arrays([0, 1, 1], y=values).fields["y"]
    assert torch.equal(y, torch.tensor(values))
