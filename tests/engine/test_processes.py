"""Several processes for chunks of clients: order, errors, messages, and the same numbers."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import hierfl
from hierfl import Share
from hierfl.core.trees import tree_leaves
from hierfl.engine import processes
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import federate
from hierfl.engine.processes import WorkerDied, crew, receive, send
from hierfl.engine.rounds import begin, rounds
from tests.engine.stepped import stepped


def pids(item: int) -> tuple[int, int, int]:
    torch.randn(200, 200) @ torch.randn(200, 200)
    return item, os.getpid(), torch.get_num_threads()


def test_results_come_in_order_from_this_process_and_from_a_copy(two_cores: None) -> None:
    with crew(pids, 2) as work:
        first = list(work(range(5)))
        found = list(work(range(5)))
    assert [item for item, _, _ in first] == [item for item, _, _ in found] == [0, 1, 2, 3, 4]
    # the first call runs in this process, where it compiles
    assert {pid for _, pid, _ in first} == {os.getpid()}
    assert [pid == os.getpid() for _, pid, _ in found] == [True, False, True, False, True]
    assert {threads for _, _, threads in (*first, *found)} == {1} and torch.get_num_threads() == 2
    gone = found[1][1]
    with pytest.raises(ProcessLookupError):
        os.kill(gone, 0)


def test_one_core_is_this_process_alone(two_cores: None) -> None:
    with crew(pids, 1) as work:
        for _ in range(3):
            assert {(pid, threads) for _, pid, threads in work(range(4))} == {(os.getpid(), 2)}


def test_without_processes_this_one_does_all(
    two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    with crew(pids, 2) as work:
        list(work(range(2)))
        with pytest.warns(UserWarning, match="1 processes work where 2 could"):
            found = list(work(range(3)))
        assert {pid for _, pid, _ in (*found, *work(range(3)))} == {os.getpid()}
    monkeypatch.setattr("hierfl.engine.processes.CAN_COPY", False)
    with crew(pids, 2) as work:
        assert {threads for _ in range(2) for _, _, threads in work(range(3))} == {2}


def test_no_more_items_are_taken_than_are_worked_on() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    with crew(abs, 2) as work:
        list(work([1, 2]))
        results = work(items())
        next(results)
        assert taken == [0, 1]


def refusing(item: int) -> int:
    if item == 1:
        raise hierfl.ClientError("client 'one' fails")
    if item == 2:
        raise Unsendable(lambda: item)
    if item == 3:
        os._exit(7)
    return item


class Unsendable(Exception):
    """An error that cannot be pickled."""


@pytest.mark.parametrize(
    ("item", "error", "says"),
    [
        (1, hierfl.ClientError, "client 'one' fails"),
        (2, RuntimeError, "Unsendable"),
        (3, WorkerDied, "lower chunk"),
    ],
)
def test_an_error_in_a_copy_comes_out_here(item: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says), crew(refusing, 2) as work:
        list(work([0]))
        list(work([0, item]))


@pytest.mark.slow
def test_a_copy_compiles_what_is_new(
    two_cores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an empty cache
    graphs = Graphs()

    def task(size: int) -> tuple[torch.Tensor, list[bool]]:
        answer: torch.Tensor = stepped(graphs, torch.exp, torch.arange(float(size)))
        return answer, [made is not None for made in graphs.made.values()]

    signal.alarm(900)  # compiling on threads that were not copied would wait for ever
    with crew(task, 2) as work:
        list(work([3]))
        found = list(work([3, 4]))
    signal.alarm(0)
    torch.testing.assert_close(found[1][0], torch.arange(4.0).exp())
    assert found[1][1] == [True, True] and len(graphs.made) == 1


def ended(pid: int, within: float = 300.0) -> bool:
    """Whether a process ends within so many seconds; a zombie has ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rsplit(")")[-1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def sleeping(item: int) -> int:
    if os.getpid() != PARENT[0]:
        time.sleep(600)
    return item


PARENT = [0]


def test_a_copy_in_the_middle_of_a_task_ends_with_its_process() -> None:
    """A killed process closes its sockets, which a copy notices only once its task is done."""
    here, there = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [])
        child = os.fork()
    if child == 0:
        PARENT[0] = os.getpid()
        made = processes.copied
        processes.copied = lambda task, threads=1: told(made(task, threads), there)
        with crew(sleeping, 2) as work:
            list(work([0]))
            next(work([0, 1]))
            os.write(there, b".")
            time.sleep(600)
    found = b""
    while not found.endswith(b"."):
        found += os.read(here, 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended(int(found[:-1]))


def told(copy: processes.Copy, line: int) -> processes.Copy:
    os.write(line, str(copy.process).encode())
    return copy


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [pytest.param(Stop, marks=pytest.mark.slow), KeyboardInterrupt])
def test_copies_end_with_the_fit_whatever_is_still_held(
    kind: type[BaseException],
    two_cores: None,
    not_lowered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traceback, as notebooks keep the last one, holds the frames of the fit; its workers are gone all the same."""
    pids: list[int] = []
    made = processes.copied

    def noted(*args: Any) -> processes.Copy:
        copy = made(*args)
        pids.append(copy.process)
        return copy

    def fails(folder: Path, progress: Any, about: Any) -> None:
        if progress.round == 2:
            raise kind

    monkeypatch.setattr(processes, "copied", noted)
    monkeypatch.setattr("hierfl.runs.checkpoint.save", fails)
    with pytest.raises(kind) as held:
        kept: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 1}
        hierfl.fit(ditto(), rows(), rounds=4, cohort=16, settings=COMPILED, **kept)
    assert held.tb is not None and len(pids) == 1
    assert ended(pids[0], within=0.1)
    assert torch.get_num_threads() == 2


def test_an_interrupt_between_two_chunks_leaves_no_copy_and_all_cores(two_cores: None) -> None:
    """The generator of the results is still held, in the middle of its work."""
    pids: list[int] = []
    kept = None
    with pytest.raises(KeyboardInterrupt), crew(whoami, 2) as work:
        list(work([0]))
        kept = work(range(4))
        pids += [next(kept), next(kept)]
        raise KeyboardInterrupt
    assert kept is not None and torch.get_num_threads() == 2
    assert pids[0] == os.getpid() and ended(pids[1], within=0.1)


def whoami(item: int) -> int:
    return os.getpid()


TREES = {
    "nested": {"a": (torch.arange(6.0).view(2, 3), [torch.tensor(True)]), "b": 3},
    "empty, strided and short": (torch.zeros(0, 4), torch.eye(3).t()[1:], torch.ones(2).bfloat16()),
    "sums": {"up": Share(torch.ones(3, dtype=torch.float64), torch.tensor(2.0))},
}


@pytest.mark.parametrize("name", TREES)
def test_a_message_is_received_as_it_was_sent(name: str) -> None:
    here, there = socket.socketpair()
    send(here, TREES[name])
    before, after = tree_flatten(TREES[name]), tree_flatten(receive(there))
    here.close()
    with pytest.raises(EOFError):
        receive(there)
    there.close()
    assert before[1] == after[1]
    for one, two in zip(before[0], after[0], strict=True):
        if isinstance(one, torch.Tensor):
            assert isinstance(two, torch.Tensor) and one.dtype == two.dtype
            assert torch.equal(one, two)
            two.add_(1) if two.dtype != torch.bool else None  # it can be written to
        else:
            assert one == two


def rows() -> hierfl.ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=g)
    return hierfl.ClientData.from_arrays(torch.arange(200) % 17, x=x, y=torch.arange(200) % 3)


COMPILED = hierfl.Settings(compile=True)


def ditto() -> hierfl.Method:
    """Return a method with states of clients, whose steps are traced in a second."""
    torch.manual_seed(0)
    return hierfl.methods.ditto(hierfl.models.network(nn.Linear(4, 3)), batch_size=5)


def fedabml() -> hierfl.Method:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = hierfl.models.bayesian_network(net, prior_scale="learned")
    return hierfl.methods.fedabml(model, draws=1, steps=1, batch_size=5)


@pytest.mark.slow
def test_a_fit_does_not_depend_on_chunks_at_once(two_cores: None, not_lowered: None) -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        fitted = hierfl.fit(ditto(), rows(), rounds=3, cohort=16, seed=3, settings=COMPILED)
        found.append(tree_leaves((fitted.progress.server, fitted.progress.table)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_the_states_of_clients_stay_where_they_are(
    two_cores: None, not_lowered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy reads and writes the rows of its clients in memory that all processes share."""
    federation = replace(federate(ditto(), rows(), cohort=16), graphs=Graphs())
    traveled: list[Any] = []
    receive_one = processes.Copy.receive

    def received(copy: processes.Copy) -> Any:
        done = receive_one(copy)
        traveled.append(done.own)
        return done

    monkeypatch.setattr(processes.Copy, "receive", received)
    begun = begin(federation)
    *_, last = rounds(federation, begun, 3)
    assert traveled and all(own is None for own in traveled)
    assert bool(last.table.seen.any()) and not bool(begun.table.seen.any())


def test_every_core_has_as_many_chunks(two_cores: None) -> None:
    eager = federate(fedabml(), rows(), settings=hierfl.Settings(chunk=7))
    compiled = replace(eager, graphs=Graphs())
    assert (eager.cores, compiled.cores) == (1, 2)
    assert [len(part) for part in eager.parts(torch.arange(17), {})] == [6, 6, 5]
    assert [len(part) for part in compiled.parts(torch.arange(17), {})] == [5, 5, 5, 2]
    assert [len(part) for part in compiled.parts(torch.arange(16), {})] == [4, 4, 4, 4]


@pytest.mark.slow
def test_short_chunks_are_filled_and_one_shape_is_compiled(
    two_cores: None, not_lowered: None
) -> None:
    torch.set_num_threads(1)
    graphs = Graphs()
    eager = federate(fedabml(), rows(), settings=hierfl.Settings(chunk=7))
    compiled = replace(eager, graphs=graphs)
    assert {len(part) for part in compiled.parts(torch.arange(17), {})} == {5, 6}
    [*_, here] = rounds(compiled, begin(compiled), 2)
    [*_, there] = rounds(eager, begin(eager), 2)
    leaves = (tree_leaves((end.server, end.table)) for end in (here, there))
    for one, two in zip(*leaves, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert len(graphs.made) == 1, "the restart reads no rows, and is not compiled"
    for one, two in zip(here.history, there.history, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-10)


@pytest.mark.filterwarnings("ignore:column 0 of field 'x' has mean")
def test_the_client_that_fails_is_named_in_any_chunk(two_cores: None, not_lowered: None) -> None:
    data = rows()
    hard = data.fields["x"].clone()
    hard[int(data.offsets[5])] = 1e200
    data = data.with_fields(x=hard)
    model = hierfl.models.network(nn.Linear(4, 3))
    method = hierfl.methods.fedavg(model, optimizer=hierfl.optimizers.SGD(1e200), steps=3)
    with pytest.raises(hierfl.ClientError, match=f"client '{data.names[5]}'"):
        hierfl.fit(method, data, rounds=1, settings=COMPILED)
