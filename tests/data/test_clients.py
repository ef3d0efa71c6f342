"""ClientData: every constructor, every error message, and the invariants of select, where and split."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from hierfl import ClientData


def federation(sizes: Mapping[str, int] | None = None) -> ClientData:
    """Clients whose rows hold the first letter of their client's name and their position: mix-ups show."""
    sizes = {"b": 5, "a": 1, "c": 3} if sizes is None else sizes
    clients = {
        name: {
            "x": torch.stack([torch.full((n,), float(ord(name[0]))), torch.arange(n) * 1.0], 1),
            "y": torch.arange(n),
        }
        for name, n in sizes.items()
    }
    return ClientData.from_clients(
        clients,
        client_fields={"letter": [float(ord(name[0])) for name in sizes]},
        features={"x": ["letter", "place"]},
    )


def rows_by_client(data: ClientData) -> dict[str, list[list[float]]]:
    x = data.fields["x"].tolist()
    return {
        name: x[int(data.offsets[k]) : int(data.offsets[k + 1])]
        for k, name in enumerate(data.names)
    }


def assert_rows_belong_to_their_clients(data: ClientData) -> None:
    for name, rows in rows_by_client(data).items():
        assert rows
        assert {row[0] for row in rows} == {float(ord(name[0]))}
    assert data.client_fields["letter"].tolist() == [float(ord(name[0])) for name in data.names]
    assert data.names == tuple(data.names[int(k)] for k in data.row_client.unique())


# ------------------------------------------------------------------ constructors
def test_from_arrays_groups_rows_and_keeps_their_order() -> None:
    ids = np.array(["b", "a", "b", "c", "a", "b"])
    data = ClientData.from_arrays(ids, y=np.arange(6), client_fields={"z": [[1.0], [2.0], [3.0]]})
    assert data.names == ("a", "b", "c")
    assert data.fields["y"].tolist() == [1, 4, 0, 2, 5, 3]
    assert data.counts.tolist() == [2, 3, 1]
    assert data.client_fields["z"].shape == (3, 1)
    assert data.num_rows == 6


def test_from_arrays_names_integer_ids_in_numeric_order() -> None:
    unnamed = ClientData.from_arrays(torch.tensor([10, 9, 10]), y=[1.0, 2.0, 3.0])
    assert unnamed.names == ("9", "10")
    named = ClientData.from_arrays([1, 0, 1], names=["nine", "ten"], y=[1.0, 2.0, 3.0])
    assert named.names == ("nine", "ten")
    assert torch.equal(unnamed.fields["y"], named.fields["y"])


def test_the_constructors_agree() -> None:
    frame = pd.DataFrame(
        {"who": ["u", "v", "u"], "age": [1.0, 2.0, 3.0], "sex": [0.0, 1.0, 1.0], "ill": [0, 1, 0]}
    )
    from_frame = ClientData.from_frame(frame, "who", x=["age", "sex"], y="ill")
    x = frame[["age", "sex"]].to_numpy()
    from_arrays = ClientData.from_arrays(
        frame["who"].to_numpy(), features={"x": ["age", "sex"]}, x=x, y=frame["ill"].to_numpy()
    )
    from_clients = ClientData.from_clients(
        {"u": {"x": x[[0, 2]], "y": [0, 0]}, "v": {"x": x[[1]], "y": [1]}},
        features={"x": ["age", "sex"]},
    )
    for other in (from_arrays, from_clients):
        assert other.names == from_frame.names
        assert other.features == from_frame.features == {"x": ("age", "sex")}
        assert torch.equal(other.offsets, from_frame.offsets)
        assert all(torch.equal(other.fields[n], from_frame.fields[n]) for n in ("x", "y"))


def test_a_list_of_clients_is_numbered() -> None:
    assert ClientData.from_clients([{"y": [1.0]}, {"y": [2.0, 3.0]}]).names == ("0", "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_come_in_the_default_dtype_and_integers_as_they_are(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    data = ClientData.from_arrays(
        [0, 1],
        x=np.ones((2, 3), np.float16),
        n=np.ones(2, np.uint8),
        b=np.ones(2, bool),
        h=torch.ones(2, 2, 2),
    )
    assert data.fields["x"].dtype == data.fields["h"].dtype == dtype
    assert data.fields["n"].dtype == torch.int64
    assert data.fields["b"].dtype == torch.bool
    assert data.fields["h"].shape == (2, 2, 2)


def direct(**changes: Any) -> ClientData:
    good: dict[str, Any] = {
        "fields": {"x": torch.ones(3, 2)}, "offsets": torch.tensor([0, 1, 3]), "names": ("a", "b"),
        "client_fields": {"z": torch.ones(2)}, "features": {"x": ("p", "q")},
    }  # fmt: skip
    return ClientData(**{**good, **changes})


ROWS = [0, 0, 1]
MIXED: Any = ["a", 1]
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no field": (lambda: ClientData.from_arrays(ROWS), ValueError, "there are no fields"),
    "two of one name": (lambda: direct(names=("a", "a")), ValueError, "two clients are named 'a'"),
    "names and clients": (lambda: direct(names=("a", "b", "c")), ValueError, "fit 3 names"),
    "no rows": (lambda: direct(offsets=torch.tensor([0, 3, 3])), ValueError, "client 'b' has no rows"),
    "offsets that fall": (lambda: direct(offsets=torch.tensor([0, 4, 3])), ValueError, "client 'b' has no rows"),
    "length of a field": (
        lambda: direct(fields={"x": torch.ones(4, 2)}), ValueError, "field 'x' has 4 rows, but the clients have 3"
    ),
    "field twice": (
        lambda: direct(client_fields={"x": torch.ones(2)}), ValueError, "'x' is both a field and a client field"
    ),
    "length of a client field": (lambda: direct(client_fields={"z": torch.ones(3)}), ValueError, "'z' has 3 values"),
    "features too few": (lambda: direct(features={"x": ("p",)}), ValueError, "features name 1 columns of 'x'"),
    "features of nothing": (
        lambda: direct(features={"w": ("p", "q")}), ValueError, "features name 2 columns of 'w'"
    ),
    "ids of two dims": (
        lambda: ClientData.from_arrays([[0], [1]], y=[1, 2]), ValueError, r"client_id has shape \(2, 1\)"
    ),
    "floating ids": (
        lambda: ClientData.from_arrays([0.0, np.nan], y=[1, 2]), TypeError, "client_id must be integers or strings"
    ),
    "too few names": (
        lambda: ClientData.from_arrays(ROWS, names=["a"], y=ROWS), ValueError, "`names` has 1 entries"
    ),
    "names for strings": (
        lambda: ClientData.from_arrays(["u"], names=["a"], y=[1]), ValueError, "ids must be integers"
    ),
    "a name without rows": (
        lambda: ClientData.from_arrays([0, 2], names=["a", "b", "c"], y=[1, 2]), ValueError, "client 'b' has no rows"
    ),
    "rows of a field": (
        lambda: ClientData.from_arrays(ROWS, y=[1, 2]), ValueError, "'y' has 2 rows, but client_id has 3"
    ),
    "a number for a field": (lambda: ClientData.from_arrays([0], y=1.0), ValueError, "field 'y' is a single number"),
    "words": (lambda: ClientData.from_arrays(["u"], y=["ill"]), TypeError, "field 'y' is not numeric"),
    "complex": (lambda: ClientData.from_arrays([0], y=[1j]), TypeError, "field 'y' is complex"),
    "no clients": (lambda: ClientData.from_clients([]), TypeError, "with at least one"),
    "a client lacks a field": (
        lambda: ClientData.from_clients({"u": {"y": [1], "x": [2]}, "v": {"y": [1]}}), ValueError,
        "client 'v' has the fields"
    ),
    "lengths within a client": (
        lambda: ClientData.from_clients({"u": {"y": [1], "x": [2, 3]}}), ValueError,
        "client 'u' has fields of different lengths"
    ),
    "another shape": (
        lambda: ClientData.from_clients({"u": {"x": np.ones((2, 3))}, "v": {"x": np.ones((2, 4))}}), ValueError,
        r"client 'v': a row of 'x' has shape \(4,\), but the first client's has \(3,\)"
    ),
    "an empty client": (
        lambda: ClientData.from_clients({"u": {"y": [1.0]}, "v": {"y": np.empty(0)}}), ValueError,
        "client 'v' has no rows"
    ),
    "no such column": (
        lambda: ClientData.from_frame(pd.DataFrame({"k": [1], "y": [2]}), "k", y="z"), KeyError, "no column 'z'"
    ),
    "unknown client": (
        lambda: direct().index(["a", "nobody"]), KeyError, "unknown client 'nobody': the clients are a, b"
    ),
    "unknown selected": (lambda: direct().select(["nobody"]), KeyError, "unknown client 'nobody'"),
    "position too large": (
        lambda: direct().select([2]), KeyError, r"no clients are at \[2\]: give all names, positions 0..1, or a mask"
    ),
    "position negative": (lambda: direct().select([-1]), KeyError, r"no clients are at \[-1\]: give all names"),
    "a short mask": (lambda: direct().select([True]), KeyError, r"no clients are at \[True\]"),
    "half a position": (lambda: direct().select(torch.tensor([0.5])), KeyError, r"no clients are at \[0.5\]"),
    "names and positions": (lambda: direct().select(MIXED), KeyError, r"no clients are at \['a', 1\]"),
    "selected twice": (lambda: direct().select(["a", "a"]), ValueError, "two clients are named 'a'"),
    "field to leave out": (lambda: direct().without("y"), KeyError, "there is no field 'y'"),
    "field of another length": (lambda: direct().with_fields(y=torch.ones(2)), ValueError, "field 'y' has 2 rows"),
    "fraction 0": (lambda: direct().split(0.0, seed=0), ValueError, "fraction is 0.0"),
    "fraction 1": (lambda: direct().split(1.0, seed=0), ValueError, "fraction is 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_raises_a_clear_error(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make()


# ------------------------------------------------------------------ subsets and changed fields
@pytest.mark.parametrize(
    "chosen", [["c", "a"], [2, 1], torch.tensor([2, 1])], ids=["names", "positions", "tensor"]
)
def test_select_takes_clients_in_the_order_given(chosen: Any) -> None:
    data = federation()
    part = data.select(chosen)
    assert part.names == ("c", "a")
    assert rows_by_client(part) == {name: rows_by_client(data)[name] for name in ("c", "a")}
    assert part.features == data.features
    assert_rows_belong_to_their_clients(part)


def test_where_keeps_rows_and_drops_clients_without_any() -> None:
    data = federation()
    part = data.where(data.fields["x"][:, 1] >= 1.0)
    assert part.names == ("b", "c")
    assert part.counts.tolist() == [4, 2]
    assert_rows_belong_to_their_clients(part)


def test_with_fields_and_without() -> None:
    data = federation()
    wider = data.with_fields(x=torch.ones(9, 3), w=torch.ones(9))
    assert "x" not in wider.features
    assert data.with_fields(x=torch.zeros(9, 2)).features == data.features
    assert set(wider.fields) == {"x", "y", "w"} > set(wider.without("x", "w").fields)
    assert "x" not in data.without("x").features
    assert set(data.fields) == {"x", "y"}


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.7, 0.99])
def test_split_divides_every_client(fraction: float, global_generator_untouched: None) -> None:
    data = federation({"a": 1, "b": 2, "c": 3, "d": 40})
    first, second = data.split(fraction, seed=3)
    assert_rows_belong_to_their_clients(first)
    assert_rows_belong_to_their_clients(second)
    both = {
        name: sorted([*rows, *rows_by_client(second).get(name, [])])
        for name, rows in rows_by_client(first).items()
    }
    assert both == {name: sorted(rows) for name, rows in rows_by_client(data).items()}
    assert "a" not in second.names
    for name, n in (("b", 2), ("c", 3), ("d", 40)):
        assert len(rows_by_client(first)[name]) == min(max(round(n * fraction), 1), n - 1)


def test_split_depends_on_seed_and_name_not_on_the_order_of_clients() -> None:
    data = federation({"a": 30, "b": 30, "c": 30})
    part = data.split(0.5, seed=1)[0]
    turned = data.select(["c", "a", "b"]).split(0.5, seed=1)[0]
    alone = data.select(["b"]).split(0.5, seed=1)[0]
    assert rows_by_client(part) == rows_by_client(turned)
    assert rows_by_client(part)["b"] == rows_by_client(alone)["b"]
    places = {name: [row[1] for row in rows] for name, rows in rows_by_client(part).items()}
    assert places["a"] != places["b"] != places["c"]
    assert places["a"] != [row[1] for row in rows_by_client(data.split(0.5, seed=2)[0])["a"]]


def test_split_draws_every_row_equally_often() -> None:
    data = federation({"a": 10})
    times = np.zeros(10)
    for seed in range(400):
        times[data.split(0.3, seed=seed)[0].fields["y"].numpy()] += 1
    # Binomial(400, 0.3): mean 120, sd 9.2; 4.5 sd.
    assert np.abs(times - 120).max() < 41


def test_keys_depend_on_the_names_alone() -> None:
    data, turned = federation(), federation().select(["c", "b", "a"])
    assert torch.equal(data.keys[data.index(["a"])], turned.keys[turned.index(["a"])])
    assert len(data.keys.unique(dim=0)) == 3
    assert repr(data) == "ClientData(3 clients, 9 rows, x: (2,), y: (), letter: ())"
