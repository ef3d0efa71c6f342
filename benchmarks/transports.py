"""What a round costs over each transport: bytes and seconds, for the demo's hierarchy at four hospitals.

    python -m benchmarks.transports

The nodes are in one process, in turn, the server in another; both on this machine. vantage6 is its own mock (where
vantage6-algorithm-tools is installed), in which all is one process; Flower hands messages on in memory. What
a deployed Flower or vantage6 adds to a round, programs that start and queues, is on docs/operators.md.
"""

from __future__ import annotations

import argparse
import base64
import runpy
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.demo.run import hierarchy, hospitals
from hierfl.nodes import Answer, Reached, by_files, over, station
from hierfl.nodes.request_files import answer_waiting

ROOT = Path(__file__).parents[1]
LOOK = 0.02  # seconds between two looks into folders, on both sides


def model() -> Any:
    """Return the demo's hierarchy."""
    return hierarchy(centered=True)


@dataclass
class Cost:
    """What crossed in the rounds, and when each began and ended."""

    asked: int = 0
    answered: int = 0
    rounds: int = 0
    seconds: float = 0.0
    before: int = 0
    written: Callable[[bytes], int] = field(default=len)

    def watching(self, nodes: Reached) -> Reached:
        """Return nodes whose requests and answers are counted."""
        send = nodes.send

        def counted(kind: str, contents: Mapping[Any, bytes]) -> Iterator[Any]:
            began, answers = time.perf_counter(), list(send(kind, contents))
            sizes = [self.written(one) for _, one in answers if isinstance(one, bytes)]
            if kind == "round":
                self.rounds += 1
                self.seconds += time.perf_counter() - began
                self.asked += sum(map(self.written, contents.values()))
                self.answered += sum(sizes)
            else:
                self.before += sum(sizes) + sum(map(self.written, contents.values()))
            yield from answers

        return Reached(counted, nodes.nodes, nodes.fewest)


def stations(folder: Path) -> dict[str, Any]:
    """Return the stations of the hospitals."""
    data = hospitals()
    return {name: station(model(), data.select([name]), folder / name) for name in data.names}


def in_memory(folder: Path) -> Reached:
    """Return nodes of this process."""
    here = stations(folder)

    def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
        for name, request in requests.items():
            yield Answer(name, here[name].answer(request))

    return over(ask, here)


def serve(folder: Path, port: int) -> None:
    """Answer requests over HTTPS and in files, until the process is stopped."""
    import uvicorn

    torch.set_default_dtype(torch.float64)
    example = runpy.run_path(str(ROOT / "examples" / "over_https.py"))
    here, mail = stations(folder / "https"), stations(folder / "files")

    def watch() -> None:
        while True:
            for name, one in mail.items():
                list(answer_waiting(one, folder / "mail" / name))
            time.sleep(LOOK)

    threading.Thread(target=watch, daemon=True).start()
    config = uvicorn.Config(
        example["served"](here), host="localhost", port=port, log_level="warning"
    )
    config.load()
    config.ssl = example["trusted"](folder, ssl.Purpose.CLIENT_AUTH)
    uvicorn.Server(config).run()


@contextmanager
def served(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield nodes of another process, by the name of the transport."""
    example = runpy.run_path(str(ROOT / "examples" / "over_https.py"))
    example["certificates"](folder)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.transports", "--serve", str(folder), str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        example["wait_for"](port, process)
        names = hospitals().names
        places = {name: f"https://localhost:{port}/{name}" for name in names}
        tls = example["trusted"](folder, ssl.Purpose.SERVER_AUTH)
        yield {
            "HTTPS": example["over_https"](places, tls),
            "files": by_files(folder / "mail", names, timeout=200.0, look=LOOK),
        }
    finally:
        process.terminate()
        process.wait()


def over_flower(folder: Path) -> Reached:
    """Return nodes by Flower's messages, handed on in memory; their bytes are those of protobuf."""
    from flwr.supercore.task_identity import TaskIdentity

    from hierfl.flower import apps
    from hierfl.flower.at_server import Nodes
    from tests.flower import test_apps

    for name in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    data = hospitals()
    test_apps.NAMES = data.names  # type: ignore[misc]
    client = apps(
        model(), lambda c: data.select([str(c.node_config["client"])]), done=print, nodes=4
    ).client
    grid: Any = test_apps.Grid(client, folder)
    return Reached(Nodes(grid, 60.0).send, list(grid.contexts))


def in_flower(content: bytes) -> int:
    """Return the bytes of a content in one of Flower's messages."""
    from flwr.app import ConfigRecord, RecordDict
    from flwr.common.serde import recorddict_to_proto

    record = RecordDict({"hierfl": ConfigRecord({"payload": content})})
    return int(recorddict_to_proto(record).ByteSize())


def in_vantage6(content: bytes) -> int:
    """Return the bytes of a content in the JSON of a task or a result."""
    return len(base64.b64encode(base64.b64encode(content))) + 200  # its arguments


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "PORT"), help="used by itself")
    parser.add_argument("--rounds", type=int, help="at most; default: until the method stops")
    given = parser.parse_args()
    if given.serve:
        return serve(Path(given.serve[0]), int(given.serve[1]))
    torch.set_default_dtype(torch.float64)
    here = named_leaves(hierfl.fit(model(), hospitals(), rounds=given.rounds).message)
    print(
        "| transport | kB to a node, a round | kB from a node | s a round | kB before | off hierfl.fit |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as home, served(Path(home)) as elsewhere:
        memory = in_memory(Path(home) / "memory")
        ways: dict[str, tuple[Reached, Callable[[bytes], int]]] = {
            "none: bytes in memory": (memory, len),
            "HTTPS, TLS on both sides": (elsewhere["HTTPS"], _enveloped),
            "files in folders": (elsewhere["files"], _enveloped),
            "vantage6, as its tasks": (in_memory(Path(home) / "vantage6"), in_vantage6),
            "Flower's messages": (over_flower(Path(home) / "flower"), in_flower),
        }
        for name, (nodes, written) in ways.items():
            cost = Cost(written=written)
            fit = hierfl.nodes.fit(model(), cost.watching(nodes), rounds=given.rounds)
            there, clients = named_leaves(fit.message), len(fit.clients) * cost.rounds
            off = max(float((there[k] - v).abs().max()) for k, v in here.items())
            each = cost.asked / clients / 1e3, cost.answered / clients / 1e3
            print(
                f"| {name} | {each[0]:.1f} | {each[1]:.1f} | {cost.seconds / cost.rounds:.2f} | "
                f"{cost.before / len(fit.clients) / 1e3:.1f} | {off:.0e} |",
                flush=True,
            )


def _enveloped(content: bytes) -> int:
    return len(content) + 100  # the line in front


if __name__ == "__main__":
    main()
