"""Work on a request is done in a copy of the node's process, which is ended where it takes too much."""

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import hierfl
from hierfl.cli.officer_page import entries
from hierfl.engine.supervised import Limits, Supervised, TooMuch
from hierfl.nodes import Station, TooFewNodes, station
from hierfl.nodes.envelope import read_answer, read_line
from hierfl.nodes.messages import Refused
from hierfl.runs.run_folder import held
from tests.nodes.one_process import rows
from tests.nodes.test_faults import plain
from tests.nodes.transports import INTRODUCE, assert_same, frames, plain_stations
from tests.nodes.ways import memory, vantage6
from tests.sampled import sampled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
node_module: Any = sys.modules["hierfl.nodes.node"]  # `hierfl.nodes.node` is a function too
AMPLE, MEMORY = Limits(600, 1 << 32), Limits(600, 1 << 28)


def spin() -> Any:
    while True:
        pass


def sleep() -> Any:
    time.sleep(600)


def in_torch() -> Any:
    """One operation, which no signal's handler in Python could end."""
    big = torch.ones(12_000, 12_000, dtype=torch.float64)  # 3.5e12 products and sums, in 2.3 GB
    return big @ big


def of_bytes() -> Any:
    return [bytearray(1 << 26) for _ in range(64)]


def of_torch() -> Any:
    return torch.ones(1 << 32)


def of_pandas() -> Any:
    return pd.DataFrame({"x": range(1000)}).merge(pd.DataFrame({"y": range(10**6)}), how="cross")


def wrapped() -> Any:
    try:
        return torch.ones(1 << 32)
    except RuntimeError as error:
        raise ValueError("the rows cannot be read") from error


TOO_LONG: dict[str, Callable[[], Any]] = {"python": spin, "waiting": sleep, "torch": in_torch}
TOO_LARGE: dict[str, Callable[[], Any]] = {
    "bytes": of_bytes,
    "torch": of_torch,
    "pandas": of_pandas,
    "wrapped": wrapped,
}


def node(folder: Path, work: Callable[[], Any], policy: str) -> Station:
    folder.mkdir()
    (folder / "policy.toml").write_text(policy)
    good = rows().select(["north"])
    worked = folder / "worked"

    def once() -> Any:
        if worked.exists():
            return good
        worked.touch()
        with held(folder):  # as whatever is killed in the middle of an answer
            return work()

    return replace(station(plain(), good, folder), rows=once)


@pytest.mark.slow("torch")
@pytest.mark.parametrize("name", sampled(TOO_LONG, ["waiting", "torch"]))
def test_work_that_takes_too_long_is_ended_and_the_folder_is_free(
    name: str, tmp_path: Path
) -> None:
    north, began = node(tmp_path / "n", TOO_LONG[name], "seconds_a_request = 1"), time.monotonic()
    with pytest.raises(Refused, match=r"more than the 1 s .*seconds_a_request"):
        read_answer(INTRODUCE, north.answer(INTRODUCE, by="server"))
    assert time.monotonic() - began < 300.0
    last = entries(tmp_path / "n")[-1]
    assert (last["what"], last["by"]) == ("refusal", "server")
    (tmp_path / "n" / "policy.toml").write_text("")
    assert json.loads(read_answer(INTRODUCE, north.answer(INTRODUCE)))["client"] == "north"


@pytest.mark.parametrize("name", TOO_LARGE)
def test_work_that_takes_too_much_memory_is_ended(name: str, tmp_path: Path) -> None:
    policy = f"memory_a_request = {1 << 28}\nseconds_a_request = 600"
    north = node(tmp_path / "n", TOO_LARGE[name], policy)
    with pytest.raises(Refused, match=r"more than the 268,435,456 bytes .*memory_a_request"):
        read_answer(INTRODUCE, north.answer(INTRODUCE))
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert json.loads(read_answer(INTRODUCE, north.answer(INTRODUCE)))["client"] == "north"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= largest + (1 << 16)


def test_other_errors_are_what_they_were(tmp_path: Path) -> None:
    """An error at the node is no lack of memory, and is in its log."""

    def broken() -> Any:
        raise KeyError("patient 4711")

    north = node(tmp_path / "n", broken, "")
    answer = read_line(north.answer(INTRODUCE))[0]
    assert answer["wrong"] == "the node cannot answer: its own log says why"
    assert "4711" in entries(tmp_path / "n")[-1]["detail"]
    assert sum(line["what"] == "refusal" for line in entries(tmp_path / "n")) == 1


def wait_for_end(process: int) -> None:
    until = time.monotonic() + 300.0
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < until, "the copy is still there"
        time.sleep(0.01)


def counted() -> Callable[[Any], Any]:
    number = iter(range(1000))
    return lambda item: (os.getpid(), next(number))


def test_a_copy_goes_on_from_item_to_item_and_a_new_one_takes_its_place() -> None:
    work = Supervised(counted())
    first, second = work(None, AMPLE), work(None, AMPLE)
    assert first[0] == second[0] != os.getpid() and (first[1], second[1]) == (0, 1)
    os.kill(first[0], signal.SIGKILL)  # as the system does where it is out of memory
    wait_for_end(first[0])
    third = work(None, AMPLE)
    assert third[0] != first[0] and third[1] == 0


def test_an_interrupt_begins_another_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the request that was interrupted would be taken for that of the next."""
    work = Supervised(lambda item: item)
    assert work("a", AMPLE) == "a"
    monkeypatch.setattr("hierfl.engine.processes.receive", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        work("b", AMPLE)
    monkeypatch.undo()
    assert work("c", AMPLE) == "c"


def _interrupted(line: socket.socket) -> Any:
    raise KeyboardInterrupt


def test_a_copy_computes_on_several_cores_where_the_node_does() -> None:
    """Threads of torch's are not copied: a copy of the thread that has used them waits for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        big = torch.randn(1500, 1500)
        here = big @ big
        there = Supervised(lambda item: (torch.get_num_threads(), item @ item))
        threads, found = there(big, AMPLE)
    finally:
        torch.set_num_threads(before)
    assert threads == 2
    torch.testing.assert_close(found, here)


def test_a_copy_holds_no_connection_of_the_node_open() -> None:
    work = Supervised(lambda item: item)
    here, there = socket.socketpair()
    with here:
        with there:
            work(None, AMPLE)
        here.settimeout(300.0)
        assert here.recv(1) == b""


def test_a_copy_ends_with_the_node() -> None:
    work = Supervised(lambda item: os.getpid())
    process = work(None, AMPLE)
    del work
    wait_for_end(process)


def test_the_size_of_memory_is_beside_what_the_node_has_loaded() -> None:
    loaded = bytearray(1 << 29)
    work = Supervised(lambda size: len(loaded) + len(bytearray(size)))
    assert work(1 << 27, MEMORY) == (1 << 29) + (1 << 27)
    with pytest.raises(TooMuch):
        work(1 << 29, MEMORY)


def test_a_formula_of_a_giant_design_is_too_much(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "policy.toml").write_text(f"memory_a_request = {1 << 27}\n")
    text = "y ~ poly(age, 6):poly(thalach, 6) + (1 | hospital)"
    model = hierfl.formula(text, family="bernoulli", clients="hospital")
    many = pd.concat([frames()["va"]] * 1500, ignore_index=True)  # more than this process has free
    nodes = {"n": station(model, {"va": many}, tmp_path / "n")}
    with memory(tmp_path) as way, pytest.raises(TooFewNodes, match=r"(?s)schema.*memory_a_request"):
        hierfl.nodes.fit(model, way.reached(nodes))


@pytest.mark.parametrize("way_of", [memory, vantage6])
def test_a_round_that_takes_too_much_leaves_its_node_out_and_the_next_does_not(
    way_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stations = plain_stations(tmp_path)
    stations["north"].folder.mkdir()
    (stations["north"].folder / "policy.toml").write_text(f"memory_a_request = {1 << 28}\n")
    right = node_module.client_round

    def large(federation: Any, *args: Any) -> Any:
        if federation.data.names == ("north",) and args[-1] == 1:
            torch.ones(1 << 32)
        return right(federation, *args)

    monkeypatch.setattr(node_module, "client_round", large)
    with way_of(tmp_path) as way:
        fit = hierfl.nodes.fit(plain(), way.reached(stations), rounds=3)
    assert fit.history["clients"].tolist() == [4, 3, 4]
    ((left_out,),) = [one for one in fit.history["left_out"] if one]
    assert "memory_a_request" in left_out["reason"]


def test_a_fit_is_the_same_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where processes cannot be copied."""
    fits = []
    for can_copy in (True, False):
        monkeypatch.setattr("hierfl.engine.supervised.CAN_COPY", can_copy)
        with memory(tmp_path) as way:
            nodes = way.reached(plain_stations(tmp_path / str(can_copy)))
            fits.append(hierfl.nodes.fit(plain(), nodes, rounds=2))
    assert_same(*fits)
