"""Nodes and a server that are really killed: the run ends, and every answer is in the posterior
exactly once.
"""

from pathlib import Path

import pytest

from benchmarks import node_fault_processes as processes
from benchmarks.node_fault_problem import clients, method
from benchmarks.node_faults import NODES, SERVER, carried_out, planned
from hierfl.core import disk
from hierfl.nodes import client_state
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.node import node


@pytest.mark.slow
def test_killed_processes_lose_nothing(tmp_path: Path) -> None:
    plan = planned(8, 8, tmp_path / "run", seed=1, timeout=10.0)
    found = carried_out(plan)
    assert sum(found.faults.values()) >= 6 and found.deaths >= 1
    assert found.factors < 1e-9 and found.withheld == {}


def test_a_plan_has_each_kind_once_at_its_time(tmp_path: Path) -> None:
    plan = planned(50, 60, tmp_path, seed=1, timeout=1.0)
    assert planned(50, 60, tmp_path, seed=1, timeout=1.0) == plan
    assert planned(50, 60, tmp_path, seed=2, timeout=1.0) != plan
    assert len(plan.faults) == 50 and len({one.number for one in plan.faults}) == 50
    kinds = {one.kind for one in plan.faults}
    assert kinds == {*dict(NODES), *dict(SERVER), "joins late"}
    assert all(one.round < 58 for one in plan.faults)
    for one in plan.faults:  # nothing happens to a node before it has joined
        assert one.kind == "joins late" or one.round > plan.late.get(one.who, -1)


def test_a_fault_happens_once_and_not_before_its_round(tmp_path: Path) -> None:
    (tmp_path / processes.DONE).mkdir()
    fault = processes.Fault(0, 3, "a", "answers twice")
    plan = processes.Plan(tmp_path, 9, 1.0, (fault,))
    assert plan.happens("a", 2, "answers twice") is None
    assert plan.happens("b", 3, "answers twice") is None
    assert plan.happens("a", 3, "never answers") is None
    assert plan.happens("a", 4, "never answers", "answers twice") == "answers twice"
    assert plan.happens("a", 4, "answers twice") is None


def test_a_node_that_is_killed_while_it_writes_keeps_the_state_before(tmp_path: Path) -> None:
    """Half of a file has been written, in a process of its own that is gone then."""
    from multiprocessing import get_context

    part = clients().select(["a"])
    agreement = Agreement.between([Introduction.of(part)])
    made = node(method(), part, agreement, tmp_path, seed=1)
    own = made.federation.client.own
    client_state.keep(made, client_state.ClientStates(4, 3, own, own))

    def dies() -> None:
        disk.__dict__["write_private"] = processes.dying_half_way
        client_state.keep(made, client_state.ClientStates(5, 4, own, own))

    process = get_context("fork").Process(target=dies)
    process.start()
    process.join(300)
    assert process.exitcode == -9
    assert client_state.kept(made).round == 4
