"""Nodes and a server that are really killed: the run ends, and every answer is in the posterior
exactly once.
"""

from pathlib import Path

import pytest

from benchmarks import node_fault_processes as processes
from benchmarks.node_fault_problem import clients, method
from benchmarks.node_faults import carried_out, planned
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
