"""Fits over transports of one's own: as here; and hostile requests and answers are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import hierfl
from hierfl.nodes import Reached, Refused, Station, over
from hierfl.nodes import TooFewNodes as TooFew
from hierfl.nodes.envelope import read_answer, write_answer, write_request
from hierfl.nodes.log import entries
from tests.nodes.test_faults import HOSTILE, plain
from tests.nodes.transports import (
    answering,
    asked_by,
    assert_refused,
    assert_same,
    demo,
    demo_stations,
    formula,
    formula_stations,
    frames,
    patients,
    plain_stations,
)

Over = Callable[[Mapping[str, Station]], Reached]


@pytest.fixture
def reached() -> Over:
    """Nodes reached by a function."""
    return lambda stations: over(asked_by(answering(stations)), stations)


def test_the_demos_hierarchy_is_fitted_as_here(reached: Over, tmp_path: Path) -> None:
    found = hierfl.nodes.fit(demo(), reached(demo_stations(tmp_path)))
    assert found.chosen is not None and found.chosen.startswith("two_stage")
    assert_same(found, hierfl.fit(demo(), patients()))


def test_a_formula_is_fitted_as_here(reached: Over, tmp_path: Path) -> None:
    found = hierfl.nodes.fit(formula(), reached(formula_stations(tmp_path)))
    assert_same(found, hierfl.fit(formula(), frames()))


def test_wrong_answers_are_refused(reached: Over, tmp_path: Path) -> None:
    nodes = reached(plain_stations(tmp_path))
    assert_refused(hierfl.nodes.fit(plain(), nodes, rounds=len(HOSTILE)))


# ------------------------------------------------------------ hostile requests
class Evil:
    def __reduce__(self) -> Any:
        return (Path("/nowhere").touch, ())


DEEP = b"[" * 100_000
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no JSON"),
    "pickle": (pickle.dumps(Evil()), "no JSON"),
    "a line without an end": (b'{"hierfl": 1, "request": "introduce", "bytes": 0}', "no file"),
    "another version": (b'{"hierfl": 2, "request": "introduce", "bytes": 0}\n', "another version"),
    "a part": (write_request("round", b"0123")[:-1], "holds 3 bytes, not 4"),
    "too long a line": (b'{"hierfl": "' + b"1" * 5000 + b'"}\n', "no JSON of 4,096"),
    "deep": (DEEP + b"\n", "no JSON"),
    "an answer": (write_answer(b"", b""), "no request"),
    "another kind": (write_request("rows", b""), "asks for 'rows'"),
    "a number": (b'{"hierfl": 1, "request": 7, "bytes": 0}\n', "no request"),
    "a round too soon": (write_request("round", b""), "agreed on nothing yet"),
    "a pickled round": (write_request("agree", pickle.dumps(Evil())), "no JSON"),
    "a deep agreement": (write_request("agree", DEEP), "no JSON"),
    "code": (
        write_request("agree", json.dumps({"seed": 0, "agreement": "__import__('os')"}).encode()),
        "no agreement",
    ),
    "a schema of none": (write_request("schema", b"{}"), "no formula that lacks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_node_answers_hostile_requests_by_a_fixed_text(name: str, tmp_path: Path) -> None:
    node = demo_stations(tmp_path)["cleveland"]
    request, why = WRONG[name]
    with pytest.raises(Refused, match=why):
        read_answer(request, node.answer(request, by="nobody"))
    (line,) = entries(tmp_path / "cleveland")
    assert line["what"] == "refusal" and line["by"] == "nobody"


def test_an_error_of_the_rows_leaves_no_value(tmp_path: Path) -> None:
    def broken() -> Any:
        raise KeyError("patient 4711")

    from hierfl.nodes.call import FitCall

    node, request = Station(FitCall(demo()), broken, tmp_path), write_request("introduce", b"")
    assert b"4711" not in node.answer(request)
    assert "4711" in (tmp_path / "refused.jsonl").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        pickle.dumps(Evil()),
        write_answer(b"another request", b"{}"),
        write_answer(write_request("introduce", b""), DEEP),
        write_answer(write_request("introduce", b""), b"[]"),
        write_answer(write_request("introduce", b""), b'{"client": "__import__"}'),
    ],
)
def test_a_server_goes_on_without_a_node_that_introduces_nobody(
    wrong: bytes, tmp_path: Path
) -> None:
    stations = plain_stations(tmp_path)

    def answered(name: str, request: bytes) -> bytes:
        return wrong if name == "west" else stations[name].answer(request)

    with pytest.warns(UserWarning, match="'west' is left out"):
        found = hierfl.nodes.fit(plain(), over(asked_by(answered), stations), rounds=1)
    assert found.clients == ("east", "north", "south")
    with pytest.raises(TooFew, match="3 nodes introduce a client, and 4 are needed"):
        hierfl.nodes.fit(plain(), over(asked_by(answered), stations, fewest=4), rounds=1)


def test_nodes_are_named_once() -> None:
    with pytest.raises(ValueError, match="name each once"):
        over(asked_by(lambda name, request: b""), ["a", "a"])
    with pytest.raises(ValueError, match="it must be 1 to 1"):
        over(asked_by(lambda name, request: b""), ["a"], fewest=2)
