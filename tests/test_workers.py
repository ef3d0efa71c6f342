"""Threads of their own for chunks of clients: order, errors, and the same numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import hierfl
from hierfl.federation import federate
from hierfl.graph import Graphs
from hierfl.trees import tree_leaves
from hierfl.workers import in_order


@pytest.fixture
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_parts_whoever_is_done_first() -> None:
    last = threading.Event()

    def work(part: int) -> int:
        if part == 0:
            assert last.wait(10.0)  # the first waits for the second
        elif part == 1:
            last.set()
        return 10 * part

    assert list(in_order(work, range(5), 2)) == [0, 10, 20, 30, 40]


def test_no_more_is_held_than_there_are_threads() -> None:
    begun: list[int] = []

    def work(part: int) -> int:
        begun.append(part)
        return part

    results = in_order(work, range(100), 2)
    next(results)
    assert max(begun) <= 3  # one handed over, one a thread waiting
    results.close()  # type: ignore[attr-defined]
    assert len(begun) < 100


def test_an_error_comes_out_and_nothing_runs_on() -> None:
    def work(part: int) -> int:
        if part == 1:
            raise ValueError("part 1")
        return part

    with pytest.raises(ValueError, match="part 1"):
        list(in_order(work, range(50), 2))
    assert list(in_order(work, [2, 3], 2)) == [2, 3]


def test_a_worker_has_one_core_and_the_caller_keeps_its_own(two_cores: None) -> None:
    def cores(_: int) -> tuple[str, int]:
        torch.randn(200, 200) @ torch.randn(200, 200)
        return threading.current_thread().name, torch.get_num_threads()

    found = list(in_order(cores, range(6), 2))
    assert all(name.startswith("hierfl") and count == 1 for name, count in found)
    assert torch.get_num_threads() == 2


def test_threads_are_made_anew_in_a_forked_process() -> None:
    assert list(in_order(abs, [-1, -2], 2)) == [1, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [])  # Python 3.12 warns of forks of a process with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if list(in_order(abs, [-1, -2], 2)) == [1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0


def rows() -> hierfl.ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=g)
    return hierfl.ClientData.from_arrays(torch.arange(200) % 17, x=x, y=torch.arange(200) % 3)


def fedabml() -> hierfl.Method:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = hierfl.models.bayesian_network(net, prior_scale="learned")
    return hierfl.methods.fedabml(model, draws=2, steps=2, batch_size=5)


def test_a_fit_does_not_depend_on_how_many_chunks_are_worked_on_at_once(two_cores: None) -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        fitted = hierfl.fit(fedabml(), rows(), rounds=2, cohort=16, seed=3, compile=True)
        found.append(tree_leaves((fitted.progress.server, fitted.progress.table)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_every_thread_has_as_many_chunks(two_cores: None) -> None:
    eager = federate(fedabml(), rows(), chunk=7)
    compiled = replace(eager, graphs=Graphs())
    assert (eager.threads, compiled.threads) == (1, 2)
    assert [len(part) for part in eager.parts(torch.arange(17), {})] == [6, 6, 5]
    assert [len(part) for part in compiled.parts(torch.arange(17), {})] == [5, 5, 5, 2]
    assert [len(part) for part in compiled.parts(torch.arange(16), {})] == [4, 4, 4, 4]


def test_the_client_that_fails_is_named_from_a_thread(two_cores: None) -> None:
    data = rows()
    hard = data.fields["x"].clone()
    hard[int(data.offsets[5])] = 1e200
    data = hierfl.ClientData.from_arrays(torch.arange(17).repeat_interleave(data.counts), x=hard, y=data.fields["y"])
    method = hierfl.methods.fedavg(hierfl.models.network(nn.Linear(4, 3)), optimiser=hierfl.optimisers.SGD(1e200), steps=3)
    with pytest.raises(hierfl.ClientError, match=f"client '{data.names[5]}'"):
        hierfl.fit(method, data, rounds=1, compile=True)
