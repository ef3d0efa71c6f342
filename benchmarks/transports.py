"""What a round costs over each transport: bytes and seconds, for the demo's hierarchy at four hospitals.

    python -m benchmarks.transports --write

makes benchmarks/TRANSPORTS.md. The nodes are in one process, in turn, and the server in another; over
Flower and vantage6 both are here, and messages are handed on in memory. What a deployment adds to a round,
programs that start and queues, is not in the table.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import runpy
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.demo.run import hierarchy, hospitals
from hierfl.nodes import Answer, Reached, by_files, over, station
from hierfl.nodes.envelope import write_answer
from hierfl.nodes.request_files import answer_waiting

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "TRANSPORTS.md"
LOOK = 0.02  # seconds between two looks into folders, on both sides
HEAD = """
| transport | kB to a node, a round | kB from a node, a round | s a round | kB before the rounds | off `hierfl.fit` |
|---|---:|---:|---:|---:|---:|
"""
AFTER = """
kB before the rounds are of one node and both directions. With HTTPS and files come hierfl's own line, and without
them the headers of HTTP and TLS; with vantage6 the task's arguments, JSON and both base64; with Flower its protobuf.
Seconds are of all four nodes, one after the other, and hold their work. In a deployment each of vantage6's tasks
starts a container, and each of Flower's messages a program, or a fork of one
([operators](../docs/operators.md#what-runs-where)).
"""


def model() -> Any:
    """Return the demo's hierarchy."""
    return hierarchy(centered=True)


@dataclass
class Cost:
    """What crossed in the rounds, all nodes together, and how long they took."""

    written: Callable[[bytes], int]
    asked: int = 0
    answered: int = 0
    rounds: int = 0
    seconds: float = 0.0
    before: int = 0

    def watching(self, nodes: Reached) -> Reached:
        """Return nodes whose requests and answers are counted."""
        send = nodes.send

        def counted(kind: str, contents: Mapping[Any, bytes]) -> Iterator[Any]:
            began, answers = time.perf_counter(), list(send(kind, contents))
            seconds = time.perf_counter() - began
            asked = sum(map(self.written, contents.values()))
            answered = sum(self.written(of.content) for of in answers if of.content is not None)
            if kind == "round":
                self.rounds += 1
                self.seconds += seconds
                self.asked += asked
                self.answered += answered
            else:
                self.before += asked + answered
            yield from answers

        return Reached(counted, nodes.nodes, nodes.fewest)

    def line(self, name: str, clients: int, off: float) -> str:
        """Return the line of the table."""
        each = clients * self.rounds * 1e3
        return (
            f"| {name} | {self.asked / each:.1f} | {self.answered / each:.1f} | "
            f"{self.seconds / self.rounds:.2f} | {self.before / clients / 1e3:.1f} | {off:.0e} |"
        )


# ------------------------------------------------------------ in this process
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


class Grid:
    """Flower's grid in this process: hands messages to the client app, one context a node."""

    def __init__(self, app: Any, folder: Path) -> None:
        from flwr import app as flwr

        self.app, self.waits = app, dict[str, Any]()
        self.contexts = {
            number: flwr.Context(
                run_id=1,
                node_id=number,
                node_config={"client": name, "folder": str(folder / name)},
                state=flwr.RecordDict(),
                run_config={},
            )
            for number, name in enumerate(hospitals().names, start=1)
        }

    def get_node_ids(self) -> list[int]:
        """Return all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Any]) -> Iterator[str]:
        """Take messages."""
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = os.urandom(8).hex()
            self.waits[name] = message
            yield name

    def pull_messages(self, ids: Iterable[str]) -> Iterator[Any]:
        """Have messages answered."""
        for name in sorted(set(ids) & self.waits.keys()):
            message = self.waits.pop(name)
            yield self.app(message, self.contexts[message.metadata.dst_node_id])


def over_flower(folder: Path) -> Reached:
    """Return nodes that Flower's messages reach."""
    from flwr.supercore.task_identity import TaskIdentity

    from hierfl.flower import apps
    from hierfl.flower.at_server import FlowerServer

    for name in ("_task_id", "_run_id", "_node_id"):  # as in a process that Flower starts
        setattr(TaskIdentity, name, 1)
    data = hospitals()
    client = apps(
        model(), lambda c: data.select([str(c.node_config["client"])]), done=print, nodes=4
    ).client
    grid: Any = Grid(client, folder)
    return FlowerServer(grid, 60.0, 1).reached()


# ------------------------------------------------------------ in another process
def serve(folder: Path, port: int) -> None:
    """Answer requests over HTTPS and in files, until the process is stopped."""
    import uvicorn

    example = runpy.run_path(str(ROOT / "examples" / "over_https.py"))
    here, mail = stations(folder / "https"), stations(folder / "files")

    def watch() -> None:
        while True:
            for name, one in mail.items():
                list(answer_waiting(one, folder / "mail" / name))
            time.sleep(LOOK)

    threading.Thread(target=watch, daemon=True).start()
    config = uvicorn.Config(
        example["served"](here), "localhost", port, log_level="warning", ws="none"
    )
    config.load()
    config.ssl = example["trusted"](folder, ssl.Purpose.CLIENT_AUTH)
    uvicorn.Server(config).run()


@contextmanager
def served(folder: Path) -> Iterator[dict[str, Reached]]:
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


# ------------------------------------------------------------ bytes
def enveloped(content: bytes) -> int:
    """Return the bytes of a content behind hierfl's own line."""
    return len(write_answer(b"", content))


def in_flower(content: bytes) -> int:
    """Return the bytes of a content in one of Flower's messages."""
    from flwr.app import ConfigRecord, RecordDict
    from flwr.common.serde import recorddict_to_proto

    record = RecordDict({"hierfl": ConfigRecord({"payload": content})})
    return int(recorddict_to_proto(record).ByteSize())


def in_vantage6(content: bytes) -> int:
    """Return the bytes of a content in a task or a result, which vantage6 sends as base64 of JSON."""
    text = base64.b64encode(write_answer(b"", content)).decode()
    asked = {"formula": "y ~ age + (1 + age | hospital)", "clients": "hospital", "priors": None}
    sent = {"method": "partial", "kwargs": {**asked, "family": "bernoulli", "request": text}}
    return len(base64.b64encode(json.dumps(sent).encode()))


def written(lines: list[str]) -> None:
    """Write the table."""
    load = f"{os.cpu_count()} cores, which {os.getloadavg()[1]:.0f} processes wanted"
    head = (
        "# What a round costs over each transport\n\n"
        "`python -m benchmarks.transports --write`: the demo's hierarchy at four hospitals by "
        f"`two_stage`,\none thread each, on {load}.\n"
    )
    FILE.write_text(head + HEAD + "\n".join(lines) + "\n" + AFTER)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "PORT"), help="used by itself")
    parser.add_argument("--rounds", type=int, help="at most; default: until the method stops")
    parser.add_argument("--write", action="store_true", help="make benchmarks/TRANSPORTS.md")
    given = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if given.serve:
        return serve(Path(given.serve[0]), int(given.serve[1]))
    here = named_leaves(hierfl.fit(model(), hospitals(), rounds=given.rounds).message)
    lines = []
    with tempfile.TemporaryDirectory() as home, served(Path(home)) as elsewhere:
        ways: dict[str, tuple[Reached, Callable[[bytes], int]]] = {
            "bytes in memory": (in_memory(Path(home) / "memory"), enveloped),
            "HTTPS": (elsewhere["HTTPS"], enveloped),
            "files in folders": (elsewhere["files"], enveloped),
            "vantage6, handed on in memory": (in_memory(Path(home) / "vantage6"), in_vantage6),
            "Flower, handed on in memory": (over_flower(Path(home) / "flower"), in_flower),
        }
        for name, (nodes, of_bytes) in ways.items():
            cost = Cost(of_bytes)
            fit = hierfl.nodes.fit(model(), cost.watching(nodes), rounds=given.rounds)
            there = named_leaves(fit.message)
            off = max(float((there[k] - v).abs().max()) for k, v in here.items())
            lines.append(cost.line(name, len(fit.clients), off))
            print(lines[-1], flush=True)
    if given.write:
        written(lines)


if __name__ == "__main__":
    main()
