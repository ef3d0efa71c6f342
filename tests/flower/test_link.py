"""A run at a SuperLink that this process serves; deployments with nodes are run by examples/flower_hospitals."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import hierfl
from hierfl import methods
from hierfl.core.trees import named_leaves
from hierfl.flower import SuperLink, apps, superlink
from hierfl.flower.at_server import FlowerServer
from hierfl.flower.project import write_project
from hierfl.nodes import TooFewNodes
from tests.flower.test_apps import Grid, identity
from tests.nodes.one_process import rows
from tests.programs import fit, logistic

pytestmark = pytest.mark.usefixtures("without_copies")

__all__ = ["identity"]  # a fixture of every test here


class Task:
    """A task whose grid is in this process."""

    def __init__(self, grid: Any) -> None:
        self.grid, self.over = grid, False

    def begin(self) -> None:
        if self.over:
            raise RuntimeError("run 1 at the SuperLink is over")

    def end(self) -> None:
        self.over = True


def linked(project: Any, folder: Path) -> SuperLink:
    """Return a link to four nodes that have the app of a project."""
    made = apps(
        project,
        lambda context: rows().select([str(context.node_config["client"])]),
        done=print,
        nodes=4,
    )
    task: Any = Task(Grid(made.client, folder))
    return SuperLink(FlowerServer(task.grid, 0.1, 4, before=task.begin), task)


def apart(one: Any, other: Any) -> float:
    expected = named_leaves(other.message)
    return max(
        float((value - expected[name]).abs().max())
        for name, value in named_leaves(one.message).items()
    )


def test_the_server_names_method_and_seed_and_nodes_take_them(tmp_path: Path) -> None:
    method = methods.fedsvi(logistic)
    with linked(logistic, tmp_path) as there:
        over = hierfl.nodes.fit(method, there, rounds=2, seed=3)
        assert apart(over, fit(method, rows(), rounds=2, seed=3)) < 1e-9
        (tmp_path / "west" / "policy.toml").write_text('may_leave = ["summaries"]\nmin_count = 2\n')
        assert list(over.local_summary(10).given) == ["west"]
        chosen = hierfl.nodes.fit(logistic, there, rounds=1, disclose="sums")
        assert chosen.chosen is not None
        assert apart(chosen, fit(chosen.method, rows(), rounds=1)) < 1e-9
        withheld = over.local_summary(10).withheld  # the nodes have gone on to the second fit
        assert f"it is of run '{over.run}', and this node is in '{chosen.run}'" in withheld["west"]
    with pytest.raises(RuntimeError, match="at the SuperLink is over"):
        chosen.local_summary(10)


def test_a_node_that_would_run_something_else_is_found_before_the_first_round(
    tmp_path: Path,
) -> None:
    there = linked(methods.fedsvi(logistic, local_steps=2), tmp_path)
    with pytest.raises(TooFewNodes, match="client 'east': it would run another method, model or"):
        hierfl.nodes.fit(methods.fedsvi(logistic), there, rounds=1)
    there = linked(logistic, tmp_path / "other")

    def own(batch: Any) -> Any:
        return logistic(batch)

    with pytest.raises(TooFewNodes, match=r"0 nodes agree .*'east': .*method cannot be made here"):
        hierfl.nodes.fit(methods.fedsvi(own), there, rounds=1)


def test_arguments_of_the_link_are_checked_before_anything_is_reached(tmp_path: Path) -> None:
    project = tmp_path / "four"
    write_project("four", tmp_path)
    loose: Any = superlink
    wrong: dict[str, dict[str, Any]] = {
        "has no pyproject.toml: write a project": {"project": tmp_path},
        "nodes is 0: it must be 1 or more": {"nodes": 0},
        "fewest is 0": {"fewest": 0},
        "insecure is True, and root_certificates": {"insecure": True, "root_certificates": "ca"},
    }
    for words, options in wrong.items():
        with pytest.raises(ValueError, match=words):
            loose("127.0.0.1:1", **{"project": project, "nodes": 4, **options})
    with pytest.raises(ConnectionError, match=r"no SuperLink is reached at 127\.0\.0\.1:1 "):
        superlink("127.0.0.1:1", project=project, nodes=4, insecure=True)


@contextmanager
def started(folder: Path, *options: str) -> Iterator[str]:
    """Start a SuperLink without nodes, and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).parent / "flower-superlink")
    command = [program, "--insecure", "--host", "127.0.0.1", "--port", str(port), *options]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {**os.environ, "FLWR_HOME": str(folder / "home"), "PATH": path}
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / f"{port}.log", "w"))
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**settings, "FLWR_TELEMETRY_ENABLED": "0"}
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        address = f"127.0.0.1:{port}"
        _until(lambda: socket.create_connection(("127.0.0.1", port)).close())
        yield address


def _until(done: Callable[[], object]) -> None:
    for _ in range(3000):
        try:
            done()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError


@pytest.mark.slow
def test_a_superlink_hands_its_run_to_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.proto.control_pb2 import ListRunsRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient

    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    write_project("four", tmp_path)
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_bytes(b"s" * 32)
    wrong.write_bytes(b"w" * 32)
    options = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    how: dict[str, Any] = {"project": tmp_path / "four", "nodes": 4, "insecure": True}
    with started(tmp_path, *options) as address:
        control = ControlHttpClient.from_server_address(address, True, None, [])

        def runs() -> list[str]:
            found = control.ListRuns(ListRunsRequest()).run_dict
            return [run.status.status + run.status.sub_status for run in found.values()]

        for given, words in ((None, "the one of its --superexec"), (wrong, "another one than")):
            with pytest.raises(ConnectionError, match=f"refuses .*acquire-task.*{words}"):
                superlink(address, secret=given, **how)
        assert runs() == ["finishedstopped"] * 2  # nothing is left waiting
        with superlink(address, secret=secret, timeout=2.0, **how) as there:
            assert sorted(runs()) == ["finishedstopped"] * 2 + ["running"]
            with pytest.raises(TooFewNodes, match="0 nodes are connected after 2 s, and 4 are"):
                hierfl.nodes.fit(logistic, there)
        assert sorted(runs()) == ["finishedcompleted"] + ["finishedstopped"] * 2
        with pytest.raises(RuntimeError, match=r"is over .*call hierfl\.flower\.superlink again"):
            hierfl.nodes.fit(logistic, there)
        there.close()  # does nothing
        control.close()
