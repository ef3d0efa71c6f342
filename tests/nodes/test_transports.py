"""Over each transport a fit is that of all rows here, and hostile requests and answers are refused."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import hierfl
from hierfl.cli.officer_page import entries
from hierfl.nodes import Refused, Station, over
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.envelope import read_answer
from tests.nodes.test_faults import HOSTILE, plain
from tests.nodes.transports import (
    INTRODUCE,
    INTRODUCTIONS,
    NO_ANSWERS,
    RAN,
    REQUESTS,
    assert_refused,
    assert_same,
    demo,
    demo_stations,
    formula,
    formula_stations,
    here,
    introducing,
    lying,
    plain_stations,
    rounds,
)
from tests.nodes.ways import WAYS, Way, memory
from tests.programs import assert_close
from tests.sampled import sampled

FITS = {"demo": (demo, demo_stations), "formula": (formula, formula_stations)}
# each takes seconds; the tests below go through all transports in less
FAST = {("formula", "files")}
QUICK = ("memory", "https")  # of what is read in the same way over each


@pytest.fixture(params=sampled(WAYS, QUICK))
def some_way(request: Any, tmp_path: Path) -> Iterator[Way]:
    with WAYS[request.param](tmp_path / "way") as made:
        yield made


@cache
def fit_in_memory() -> hierfl.nodes.FitOverNodes:
    """Return the fit of plain nodes that have answered nothing before."""
    with TemporaryDirectory() as folder, memory(Path(folder)) as way:
        return hierfl.nodes.fit(plain(), way.reached(plain_stations(Path(folder))), rounds=2)


@pytest.fixture(params=WAYS)
def way(request: Any, tmp_path: Path) -> Iterator[Way]:
    with WAYS[request.param](tmp_path / "way") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        pytest.param(kind, name, marks=[] if (kind, name) in FAST else pytest.mark.slow)
        for kind in FITS
        for name in WAYS
    ],
)
def test_a_fit_is_that_of_all_rows_here(kind: str, transport: str, tmp_path: Path) -> None:
    model, stations = FITS[kind]
    with WAYS[transport](tmp_path / "way") as way:
        found = hierfl.nodes.fit(model(), way.reached(stations(tmp_path / "nodes")))
    assert found.chosen is not None and found.chosen.startswith("two_stage")
    assert_same(found, here(kind))


@pytest.mark.slow("memory", "vantage6")
def test_hostile_requests_are_answered_by_a_fixed_text(way: Way, tmp_path: Path) -> None:
    """Each is in the node's log, none runs or leaves anything, and the node goes on as before."""
    stations = plain_stations(tmp_path)
    east = stations["east"]
    for name, (request, why) in REQUESTS.items():
        with pytest.raises(Refused, match=why):
            read_answer(request, way.ask(east, request))
        line = entries(tmp_path / "east")[-1]
        assert line["what"] == "refusal" and line.get("by") == way.by, name
    fitted = hierfl.nodes.fit(plain(), way.reached(stations), rounds=2)
    before = len(entries(tmp_path / "east"))
    wrong = rounds(fitted.run)
    for name, (request, why) in wrong.items():
        with pytest.raises(Refused, match=why):
            read_answer(request, way.ask(east, request))
        assert entries(tmp_path / "east")[-1]["what"] == "refusal", name
    assert len(entries(tmp_path / "east")) == before + len(wrong) > 25
    assert_close(fit_in_memory().message, fitted.message, 0.0)
    assert not RAN.exists()


@pytest.mark.usefixtures("without_copies")
@pytest.mark.slow("https")
def test_hostile_answers_are_refused(some_way: Way, tmp_path: Path) -> None:
    nodes = some_way.reached(lying(plain_stations(tmp_path)))
    assert_refused(hierfl.nodes.fit(plain(), nodes, rounds=len(HOSTILE)))


@pytest.mark.usefixtures("without_copies")
@pytest.mark.parametrize("name", INTRODUCTIONS)
def test_a_node_that_introduces_nobody_is_left_out(name: str, tmp_path: Path) -> None:
    """Over each transport another answer is left out below."""
    nodes = introducing(plain_stations(tmp_path), west=INTRODUCTIONS[name])
    with memory(tmp_path) as way, pytest.warns(UserWarning, match="is left out"):
        found = hierfl.nodes.fit(plain(), way.reached(nodes), rounds=1)
    assert found.clients == ("east", "north", "south") and not RAN.exists()


@pytest.mark.filterwarnings("ignore:.*answers another request")
def test_what_is_no_answer_is_refused(way: Way, tmp_path: Path) -> None:
    nodes = way.reached(introducing(plain_stations(tmp_path), **NO_ANSWERS), 60.0)
    with pytest.warns(UserWarning, match="is left out") as said:
        found = hierfl.nodes.fit(plain(), nodes, rounds=1)
    assert found.clients == ("east",) and not RAN.exists()
    text = " ".join(str(one.message) for one in said)
    assert text.count("not JSON") == 2 and "it answers another request" in text


@pytest.mark.usefixtures("without_copies")
@pytest.mark.slow("https")
def test_a_node_in_the_place_of_another_is_named(
    way: Way, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Its answers are whole and right, and of another node, as of folders or addresses that were mixed up."""
    stations = plain_stations(tmp_path)
    nodes = way.reached({**stations, "west": stations["south"]})
    with pytest.warns(UserWarning, match="introduces client 'south', and so does"):
        found = hierfl.nodes.fit(plain(), nodes, rounds=1)
    # vantage6 numbers its nodes: neither is known to be 'south'
    both = {"south"} if request.node.callspec.params["way"] == "vantage6" else set[str]()
    assert {*found.clients} == {*stations} - {"west"} - both


def test_an_error_of_the_rows_leaves_no_value(way: Way, tmp_path: Path) -> None:
    def broken() -> Any:
        raise KeyError("patient 4711")

    node = Station(FitCall(plain()), broken, tmp_path / "north")
    assert b"4711" not in way.ask(node, INTRODUCE)
    assert "4711" in (tmp_path / "north" / "refused.jsonl").read_text()


def test_nodes_are_named_once() -> None:
    assert over(lambda requests: (), "north").nodes == ["north"]
    with pytest.raises(ValueError, match="name each once"):
        over(lambda requests: (), ["a", "a"])
    with pytest.raises(ValueError, match="it must be 1 to 1"):
        over(lambda requests: (), ["a"], fewest=2)
