"""Strange ids, names, fields and parts of a `ClientData`, each with what is right of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from hierfl import ClientData

Rows = Mapping[str, Mapping[str, list[Any]]]  # client -> field -> its rows, in order


@dataclass(frozen=True)
class Case:
    """One data set.

    Args:
        make: hands it to hierfl.
        things: words of which a refusal must hold one: the name of the field, client, column or
            argument.
        right: whether what was accepted is right; None: it must be refused.
    """

    make: Callable[[], Any]
    things: tuple[str, ...]
    right: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Table:
    """A clean table of clients' rows."""

    ids: list[str]
    y: list[float]
    x: list[list[float]]

    def rows(self) -> Rows:
        """Return the rows client by client, grouped by a plain loop."""
        found: dict[str, dict[str, list[Any]]] = {}
        for name, y, x in zip(self.ids, self.y, self.x, strict=True):
            own = found.setdefault(name, {"y": [], "x": []})
            own["y"].append(y)
            own["x"].append(x)
        return found


def table_of(rng: np.random.Generator) -> Table:
    """Return a table of 2 to 5 clients, whose rows are mixed and can be told apart."""
    names = [f"c{k}" for k in range(int(rng.integers(2, 6)))]
    ids = [*names, *rng.choice(names, int(rng.integers(3, 20))).tolist()]
    rng.shuffle(ids)
    y = rng.normal(size=len(ids)).astype(np.float32).astype(float).tolist()
    x = rng.normal(size=(len(ids), 3)).astype(np.float32).astype(float).tolist()
    return Table(ids, y, x)


def same(data: Any, rows: Rows, *fields: str) -> bool:
    """Return whether data hold exactly these rows, client by client."""
    if not isinstance(data, ClientData) or set(data.names) != set(rows):
        return False
    for k, name in enumerate(data.names):
        own = slice(int(data.offsets[k]), int(data.offsets[k + 1]))
        for field in fields:
            wanted = torch.tensor(rows[name][field], dtype=torch.float64)
            if not torch.equal(data.fields[field][own].double(), wanted):
                return False
    return True


# ------------------------------------------------------------------------------------- names and
# ids
def ids_that_are_missing(t: Table, rng: np.random.Generator) -> Case:
    """One row has no client."""
    ids: list[Any] = list(t.ids)
    ids[int(rng.integers(len(ids)))] = rng.choice(
        np.array([None, np.nan, pd.NA, pd.NaT, ""], object)
    )
    frame = pd.DataFrame({"who": pd.Series(ids, dtype=object), "y": t.y})
    if rng.random() < 0.5:
        return Case(lambda: ClientData.from_frame(frame, "who", y="y"), ("client",))
    return Case(lambda: ClientData.from_arrays(ids, y=t.y), ("client",))


def ids_that_look_alike(t: Table, rng: np.random.Generator) -> Case:
    """One client's name is written in two ways."""
    ids = [i.replace("c", "é") for i in t.ids]
    first = ids[0]
    other = [first + " ", unicodedata.normalize("NFD", first), "\ufeff" + first, first + "\0"]
    ids.append(str(rng.choice(np.array(other, object))))
    y = [*t.y, 0.0]
    if rng.random() < 0.5:
        clients = {name: {"y": [1.0]} for name in ids}
        return Case(lambda: ClientData.from_clients(clients), ("é", "e\u0301"))
    return Case(lambda: ClientData.from_arrays(ids, y=y), ("é", "e\u0301"))


def ids_of_mixed_kinds(t: Table, rng: np.random.Generator) -> Case:
    """Integers beside strings, booleans or floats."""
    ids: list[Any] = [int(i[1:]) for i in t.ids]
    odd: list[Any] = [str(ids[0]), True, 1.5, b"a"]
    ids[-1] = odd[int(rng.integers(len(odd)))]
    return Case(lambda: ClientData.from_arrays(ids, y=t.y), ("client_id",))


def ids_of_other_types(t: Table, rng: np.random.Generator) -> Case:
    """The same clients as another type of array."""
    number = np.array([int(i[1:]) for i in t.ids])
    made: list[Any] = [
        np.array(t.ids),
        np.array(t.ids, object),
        pd.Series(t.ids, index=[0] * len(t.ids)),
        pd.Categorical(t.ids),
        pd.array(t.ids, dtype="string"),
        tuple(t.ids),
    ]
    whole: list[Any] = [
        number.astype(np.uint64) + 2**63,
        number.astype(">i4"),
        torch.from_numpy(number.astype(np.int16)),
        pd.array(number, dtype="Int64"),
        number[::-1][::-1],
    ]
    if rng.random() < 0.5:
        ids = made[int(rng.integers(len(made)))]
        return Case(
            lambda: ClientData.from_arrays(ids, y=t.y),
            ("client_id",),
            lambda d: same(d, t.rows(), "y"),
        )
    values = whole[int(rng.integers(len(whole)))]
    listed = [str(int(i)) for i in values]
    rows = Table(listed, t.y, t.x).rows()
    return Case(
        lambda: ClientData.from_arrays(values, y=t.y), ("client_id",), lambda d: same(d, rows, "y")
    )


def ids_that_are_none(t: Table, rng: np.random.Generator) -> Case:
    """No ids: a number, nothing, a set, ids of two dimensions, floats, or a masked array."""
    made: list[Any] = [
        5,
        None,
        [],
        set(t.ids),
        np.array([t.ids]).T,
        np.arange(len(t.ids)) * 1.0,
        np.ma.array(np.arange(len(t.ids)), mask=[True] + [False] * (len(t.ids) - 1)),
        [(i, 1) for i in t.ids],
    ]
    ids = made[int(rng.integers(len(made)))]
    return Case(lambda: ClientData.from_arrays(ids, y=t.y), ("client_id", "client"))


# ------------------------------------------------------------------------------------- fields
def fields_of_other_types(t: Table, rng: np.random.Generator) -> Case:
    """The same numbers as another type of array."""
    x = np.array(t.x)
    made: list[Any] = [
        x.astype(">f8"),
        np.asfortranarray(x),
        np.repeat(x, 2, 0)[::2],
        x[::-1].copy()[::-1],
        x.astype(np.longdouble),
        x.astype(object),
        x.tolist(),
        torch.tensor(x).T.contiguous().T,
        pd.DataFrame(x, index=[0] * len(x)),
        list(torch.tensor(x)),
        np.ma.array(x, mask=False),
    ]
    values = made[int(rng.integers(len(made)))]
    return Case(
        lambda: ClientData.from_arrays(t.ids, x=values, y=t.y),
        ("'x'",),
        lambda d: same(d, t.rows(), "x", "y"),
    )


def fields_that_are_no_numbers(t: Table, rng: np.random.Generator) -> Case:
    """Values that no dense tensor of real numbers holds."""
    n = len(t.ids)
    y = torch.tensor(t.y)
    hidden: Any = np.ma.array(t.y, mask=[True] + [False] * (n - 1))
    made: list[Any] = [
        hidden,
        y.clone().requires_grad_(),
        torch.diag(y).to_sparse(),
        y + 1j,
        y.to("meta"),
        np.array(["2020-01-01"] * n, "datetime64[D]"),
        np.arange(n).astype("timedelta64[D]"),
        [str(v) for v in t.y],
        np.zeros(n, [("a", float)]),
        [[1.0]] * (n - 1) + [[1.0, 2.0]],
        set(t.y),
        None,
        1.0,
        {"a": 1},
        np.zeros((n, 0)),
        np.full(n, 2**63 + 7, np.uint64),
        torch.full((n,), 2**63 + 7, dtype=torch.uint64),
        [2**63 + 7] * (n - 1) + [1],
        [2**80] * n,
        t.y[:-1],
        [hidden[:2]] * n,
    ]
    values = made[int(rng.integers(len(made)))]
    return Case(lambda: ClientData.from_arrays(t.ids, x=t.x, y=values), ("'y'",))


def numbers_beyond_float32(t: Table, rng: np.random.Generator) -> Case:
    """Doubles that float32 rounds to infinity, or to one value."""
    made = [[1e300, *t.y[1:]], [1.7e9 + 1e-3 * v for v in t.y]]
    values = made[int(rng.integers(2))]
    if torch.get_default_dtype() == torch.float64:
        rows = Table(t.ids, values, t.x).rows()
        return Case(
            lambda: ClientData.from_arrays(t.ids, y=values), ("'y'",), lambda d: same(d, rows, "y")
        )
    return Case(lambda: ClientData.from_arrays(t.ids, y=values), ("'y'",))


def arrays_that_change_later(t: Table, rng: np.random.Generator) -> Case:
    """The user overwrites their arrays after the data were made."""
    x, y = np.array(t.x, np.float32), torch.tensor(t.y)
    inverse = np.array([int(i[1:]) for i in t.ids])

    def make() -> ClientData:
        data = ClientData.from_arrays(t.ids, x=x, y=y)
        extra = y[torch.from_numpy(np.argsort(inverse, kind="stable"))].clone()
        data = data.with_fields(y=extra)
        x[:], y[:], extra[:] = 0.0, 0.0, 0.0
        return data

    return Case(make, ("'x'",), lambda d: same(d, t.rows(), "x", "y"))


def parts_that_do_not_fit(t: Table, rng: np.random.Generator) -> Case:
    """Offsets, names, features and client fields that do not fit the rows."""
    y = torch.tensor(t.y)
    n = len(y)
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: ClientData({"y": y}, torch.tensor([1, 2, n]), ("a", "b")), "offsets"),
        (lambda: ClientData({"y": y}, torch.tensor([0, n, 2]), ("a", "b")), "'b'"),
        (lambda: ClientData({"y": y}, torch.tensor([0.0, 2.0, n]), ("a", "b")), "offsets"),
        (lambda: ClientData({"y": y}, torch.tensor([0, 2, n - 1]), ("a", "b")), "'y'"),
        (lambda: ClientData({"y": y}, torch.tensor([0, 2, n]), ("a", "nan")), "'nan'"),
        (lambda: ClientData({"y": y[:0]}, torch.tensor([0]), ()), "clients"),
        (lambda: ClientData({"y": np.array(t.y)}, torch.tensor([0, n]), ("a",)), "'y'"),  # type: ignore[dict-item]
        (lambda: ClientData.from_arrays(t.ids, y=y, client_fields={"z": [1.0]}), "'z'"),
        (lambda: ClientData.from_arrays(t.ids, y=y, client_fields={"y": [1.0]}), "'y'"),
        (lambda: ClientData.from_arrays(t.ids, x=t.x, features={"x": "abc"}), "'x'"),
        (lambda: ClientData.from_arrays(t.ids, x=t.x, features={"x": ["a", "a", "b"]}), "'a'"),
        (lambda: ClientData.from_arrays([0] * n, y=y, names="a"), "names"),
        (lambda: ClientData.from_arrays(t.ids, y=y).where(torch.zeros(n)), "keep"),
        (lambda: ClientData.from_arrays(t.ids, y=y).where(y > 1e9), "row"),
        (lambda: ClientData.from_arrays(t.ids, y=y).select("c0"), "'c0'"),
        (lambda: ClientData.from_arrays(t.ids, y=y).select(torch.tensor([0.5])), "0.5"),
    ]
    make, thing = made[int(rng.integers(len(made)))]
    return Case(make, (thing,))
