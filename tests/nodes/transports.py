"""Small fits that each transport must reach, and nodes that lie over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.data.clients import ClientData
from hierfl.demo.run import hierarchy, hospitals
from hierfl.nodes import Answer, FitOverNodes, Station, station
from hierfl.nodes.envelope import read_answer, read_request, write_answer
from tests.nodes.test_faults import HOSTILE, plain, rows

COLUMNS = ("age", "thalach")
TEXT = "y ~ age + (1 + age | hospital)"
OF: dict[str, Any] = {"family": "bernoulli", "clients": "hospital"}


def patients() -> ClientData:
    """The demo's four hospitals, with two of the columns."""
    return hospitals(COLUMNS)


def frames() -> dict[str, pd.DataFrame]:
    """The same patients as frames: hospital -> its rows."""
    found = {}
    for name in (data := patients()).names:
        part = data.select([name]).fields
        columns = {column: part["x"][:, k].numpy() for k, column in enumerate(COLUMNS)}
        found[name] = pd.DataFrame({**columns, "y": part["y"].numpy().astype(int)})
    return found


def demo() -> Any:
    return hierarchy(centered=True)


def formula() -> Any:
    return hierfl.formula(TEXT, **OF)


def demo_stations(folder: Path) -> dict[str, Station]:
    data = patients()
    return {name: station(demo(), data.select([name]), folder / name) for name in data.names}


def formula_stations(folder: Path) -> dict[str, Station]:
    parts = frames().items()
    return {name: station(formula(), {name: part}, folder / name) for name, part in parts}


def plain_stations(folder: Path) -> dict[str, Station]:
    """Nodes of four clients and a method of averages; "north" lies, in another way each round."""
    return {n: station(plain(), rows().select([n]), folder / n) for n in rows().names}


def answering(stations: Mapping[str, Station]) -> Callable[[str, bytes], bytes]:
    """Return what hands a request to a node by name; of `plain_stations`, north lies."""
    changes = iter([change for change, _ in HOSTILE.values()])

    def answered(name: str, request: bytes) -> bytes:
        answer = stations[name].answer(request)
        if name == "north" and read_request(request)[0] == "round":
            return write_answer(request, next(changes)(read_answer(request, answer)))
        return answer

    return answered


def asked_by(answered: Callable[[str, bytes], bytes]) -> Any:
    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        for name, request in requests.items():
            yield Answer(name, answered(name, request))

    return ask


def assert_same(over: FitOverNodes, here: Any) -> None:
    """As `hierfl.fit` on all rows, to 1e-9."""
    there = named_leaves(over.message)
    for name, value in named_leaves(here.message).items():
        assert float((there[name] - value).abs().max()) <= 1e-9, name


def assert_refused(over: FitOverNodes) -> None:
    """Every lie of north was refused for its reason, and the rounds went on without it."""
    wanted = HOSTILE.items()
    for (name, (_, why)), (left_out,) in zip(wanted, over.history["left_out"], strict=True):
        assert left_out["client"] == "north" and why in left_out["reason"], name
    assert over.history["clients"].tolist() == [3] * len(HOSTILE)
