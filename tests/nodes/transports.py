"""Small fits that each transport must reach, hostile messages, and nodes that lie."""

import json
import pickle
from collections.abc import Mapping
from functools import cache
from os import getpid
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

import hierfl
from hierfl import ClientData
from hierfl.demo.run import hierarchy, hospitals
from hierfl.nodes import FitOverNodes, Station, station
from hierfl.nodes.envelope import read_answer, read_request, write_answer, write_request
from hierfl.nodes.messages import to_bytes
from tests.nodes.one_process import rows
from tests.nodes.test_faults import HOSTILE, plain
from tests.nodes.test_messages import BAD
from tests.programs import assert_close

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
    """Nodes of four clients and a method of averages, which takes a tenth of a second."""
    return {n: station(plain(), rows().select([n]), folder / n) for n in rows().names}


@cache
def here(kind: str) -> Any:
    """Return the fit of all rows in this process, of the demo's hierarchy or of the formula."""
    return hierfl.fit(demo(), patients()) if kind == "demo" else hierfl.fit(formula(), frames())


def assert_same(over: FitOverNodes, here: Any) -> None:
    """As `hierfl.fit` on all rows, to 1e-9."""
    assert_close(over.message, here.message)


RAN = Path(gettempdir()) / f"hierfl-has-run-{getpid()}"  # what a pickle would make, in any process


class Evil:
    def __reduce__(self) -> Any:
        return (RAN.touch, ())


DEEP = b"[" * 100_000
REQUESTS: dict[str, tuple[bytes, str]] = {  # and why a node that has agreed on nothing refuses them
    "nothing": (b"", "not JSON"),
    "a pickle": (pickle.dumps(Evil()), "not JSON"),
    "a line without an end": (b'{"hierfl": 1, "request": "introduce", "bytes": 0}', "not a file"),
    "another version": (b'{"hierfl": 2, "request": "introduce", "bytes": 0}\n', "another version"),
    "a part": (write_request("round", b"0123")[:-1], "holds 3 bytes, not 4"),
    "too long a line": (b'{"hierfl": "' + b"1" * 5000 + b'"}\n', "more than 4,096"),
    "deep": (DEEP + b"\n", "not JSON"),
    "an answer": (write_answer(b"", b""), "not a request"),
    "another kind": (write_request("rows", b""), "asks for 'rows'"),
    "a number": (b'{"hierfl": 1, "request": 7, "bytes": 0}\n', "not a request"),
    "a round too soon": (write_request("round", b""), "has no agreement yet"),
    "a pickled agreement": (write_request("agree", pickle.dumps(Evil())), "not JSON"),
    "a deep agreement": (write_request("agree", DEEP), "not JSON"),
    "code": (
        write_request("agree", json.dumps({"seed": 0, "agreement": "__import__('os')"}).encode()),
        "not an agreement",
    ),
    "a schema of none": (write_request("schema", b"{}"), "no formula"),
}


def rounds(run: str) -> dict[str, tuple[bytes, str]]:
    """Return requests for rounds that a node in a run refuses, and why."""
    empty: dict[str, Any] = {"message": {}, "mail": {}}
    first = {"round": 0, "counted": -1}
    wrong: dict[str, tuple[Any, dict[str, Any], str]] = {
        "another run": (empty, {**first, "run": "another"}, "is of run 'another'"),
        "no mail": ({"message": {}}, first, "does not hold a mail and message"),
        "counted too far": (empty, {"round": 2, "counted": 2}, "round 2 after 2"),
        "NaN": ({"message": {"a": torch.tensor(torch.nan)}, "mail": {}}, first, "not finite"),
        "a round before the first": (empty, {"round": -1}, "not a request of the kind 'round'"),
        "a round as text": (empty, {"round": "0"}, "not a request of the kind 'round'"),
    }
    found = {name: (to_bytes(t, {"run": run, **a}), why) for name, (t, a, why) in wrong.items()}
    malformed = {name: (bad, ".") for name, bad in BAD.items() if isinstance(bad, bytes)}
    return {k: (write_request("round", v), why) for k, (v, why) in {**malformed, **found}.items()}


def lying(stations: Mapping[str, Station]) -> dict[str, Any]:
    """Return the same nodes, of which north lies in its rounds, in another way each time."""
    changes = iter([change for change, _ in HOSTILE.values()])
    north = stations["north"]

    def lie(request: bytes, *, by: str | None = None) -> bytes:
        answer = north.answer(request, by=by)
        if read_request(request)[0] != "round":
            return answer
        return write_answer(request, next(changes)(read_answer(request, answer)))

    return {**stations, "north": SimpleNamespace(answer=lie, allowed=stations["north"].allowed)}


def introducing(stations: Mapping[str, Station], **wrong: bytes) -> dict[str, Any]:
    """Return the same nodes, some of which answer everything by the same bytes."""
    lies = {
        name: SimpleNamespace(
            answer=lambda request, *, by=None, lie=lie: lie, allowed=stations[name].allowed
        )
        for name, lie in wrong.items()
    }
    return {**stations, **lies}


INTRODUCE = write_request("introduce", b"")
INTRODUCTIONS = {
    "deep": write_answer(INTRODUCE, DEEP),
    "a list": write_answer(INTRODUCE, b"[]"),
    "a name alone": write_answer(INTRODUCE, b'{"client": "__import__"}'),
    "a pickle": write_answer(INTRODUCE, pickle.dumps(Evil())),
}
NO_ANSWERS = {
    "north": b"",
    "south": pickle.dumps(Evil()),
    "west": write_answer(b"another request", b"{}"),
}


def assert_refused(over: FitOverNodes) -> None:
    """Every lie of north was refused for its reason, and the rounds went on without it."""
    wanted = HOSTILE.items()
    for (name, (_, why)), (left_out,) in zip(wanted, over.history["left_out"], strict=True):
        assert left_out["client"] == "north" and why in left_out["reason"], name
    assert over.history["clients"].tolist() == [3] * len(HOSTILE)
