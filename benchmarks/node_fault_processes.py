"""The processes of `benchmarks.node_faults`.

A server and nodes that speak the bytes of `hierfl.nodes` over a socket.

Processes are killed by SIGKILL, at named points of their work. A fault happens once: a file marks
that it has.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.node_fault_problem import SEED, clients, method
from hierfl.core import disk
from hierfl.core.trees import named_leaves, sub
from hierfl.nodes import client_state
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Answer, NodeFailed, Refused, from_bytes
from hierfl.nodes.node import answer, node
from hierfl.nodes.run import TooFewNodes, fit_nodes
from hierfl.runs import checkpoint

MOST = 1 << 24  # bytes of a message
TOO_FEW = 3  # exit status of the server
LAST = 60.0  # seconds that the server waits for answers after the last round
DONE, ROUND, RESULT = "done", "round", "result.json"  # files in the folder of the run


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, once.

    Args:
        number: of the fault.
        round: in which it happens.
        who: a client, or "server".
        kind: what happens.
    """

    number: int
    round: int
    who: str
    kind: str


@dataclass(frozen=True)
class Plan:
    """A run and its faults.

    Args:
        folder: of the run: the nodes' folders, the server's checkpoints, the socket.
        rounds: of the run.
        timeout: seconds that the server waits for answers.
        faults: that happen.
    """

    folder: Path
    rounds: int
    timeout: float
    faults: tuple[Fault, ...]

    @property
    def late(self) -> dict[str, int]:
        """Clients that join late: client -> the round in which their node is started."""
        return {one.who: one.round for one in self.faults if one.kind == "joins late"}

    def happens(self, who: str, round_: int, *kinds: str) -> str | None:
        """Return the fault that happens now, if one does, and mark it as done.

        A fault of a node that is away in its round happens when it is back.
        """
        for one in self.faults:
            now = one.who == who and 0 <= one.round <= round_ and one.kind in kinds
            if now and self.mark(one):
                return one.kind
        return None

    def mark(self, fault: Fault) -> bool:
        """Mark a fault as done, and return whether it was not done before."""
        try:
            (self.folder / DONE / str(fault.number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying_half_way(path: Path, content: bytes) -> None:
    """Write half of a file, and die."""
    path.write_bytes(content[: len(content) // 2])
    die()


# ------------------------------------------------------------------------------------------------ a
# node
def run_node(plan: Plan, name: str, agreement: Agreement) -> None:
    """Be a node until the run is over or the process is killed."""
    mine = node(method(), clients().select([name]), agreement, plan.folder / name, seed=SEED)
    held: bytes | None = None
    while not (plan.folder / RESULT).exists():
        try:
            with Client(str(plan.folder / "socket"), "AF_UNIX") as line:
                line.send_bytes(name.encode())
                while True:
                    held = _served(plan, mine, line, line.recv_bytes(), held)
        except (OSError, EOFError):  # the server is gone, or not there yet
            time.sleep(0.05)


def _served(
    plan: Plan, mine: client_state.Node, line: Connection, content: bytes, held: bytes | None
) -> bytes | None:
    """Answer one message, with what goes wrong.

    Return an answer that is held back until the next message.
    """
    round_ = from_bytes(content, most=MOST).about.get("round", -1)

    def now(*kinds: str) -> str | None:
        return plan.happens(mine.client, round_, *kinds)

    if now("killed before its work"):
        die()
    if now("killed while it writes its state"):
        disk.__dict__["write_private"] = dying_half_way
    try:
        given = b"+" + answer(mine, content)
    except (Refused, NodeFailed) as error:
        given = b"-" + str(error).encode()
    if now("killed before it answers"):
        die()
    kind = now(
        "never answers", "answers a round late", "answers twice", "answers with half a message"
    )
    if held is not None:  # in another order than they were asked for
        line.send_bytes(held)
    if kind == "answers a round late":
        return given
    if kind == "answers with half a message":
        line.send_bytes(given[: len(given) // 2])
    elif kind != "never answers":
        line.send_bytes(given)
    if kind == "answers twice":
        line.send_bytes(given)
    if now("killed after it answered"):
        die()
    return None


# ------------------------------------------------------------------------------------------------
# the server
@dataclass(frozen=True, eq=False)
class Lines:
    """The connections to nodes, by client.

    Args:
        plan: of the run.
        to: client -> its connection.
        order: of messages and answers.
    """

    plan: Plan
    to: dict[str, Connection] = field(default_factory=dict)
    order: random.Random = field(default_factory=lambda: random.Random(SEED))

    def listen(self) -> None:
        """Take connections for as long as the process lives.

        A client's new one replaces the old one.
        """
        place = self.plan.folder / "socket"
        place.unlink(missing_ok=True)
        listener = Listener(str(place), "AF_UNIX", backlog=64)

        def accepting() -> None:
            while True:
                line = listener.accept()
                self.to[line.recv_bytes().decode()] = line

        threading.Thread(target=accepting, daemon=True).start()

    def wait_for(self, names: set[str], seconds: float) -> None:
        """Wait until some clients are connected."""
        until = time.monotonic() + seconds
        while not names <= self.to.keys() and time.monotonic() < until:
            time.sleep(0.01)

    def ask(self, contents: Mapping[str, bytes]) -> Iterator[Answer]:
        """Hand messages to nodes, and yield what comes back in time, in whatever order it comes."""
        round_ = from_bytes(next(iter(contents.values())), most=MOST).about.get("round", -1)
        if round_ >= 0:
            (self.plan.folder / ROUND).write_text(str(round_))
        asked: dict[Connection, str] = {}
        for name in self.order.sample(sorted(contents), len(contents)):
            line = self.to.get(name)
            if line is None:
                yield Answer(name, None, "its node is not connected")
                continue
            try:
                line.send_bytes(contents[name])
                if self.plan.happens(name, round_, "is asked twice"):
                    line.send_bytes(contents[name])
            except OSError:
                yield self._lost(name)
                continue
            asked[line] = name
        if self.plan.happens("server", round_, "killed after it has asked"):
            die()
        yield from self._answers(asked, round_)
        if self.plan.happens("server", round_, "killed before its checkpoint"):
            die()
        if self.plan.happens("server", round_, "killed while it writes its checkpoint"):
            checkpoint.__dict__["write_private"] = dying_half_way

    def _answers(self, asked: dict[Connection, str], round_: int) -> Iterator[Answer]:
        until = time.monotonic() + (self.plan.timeout if round_ >= 0 else LAST)
        while asked and (left := until - time.monotonic()) > 0.0:
            ready = wait(list(asked), left)
            for line in self.order.sample(ready, len(ready)):
                name = asked[line]  # type: ignore[index]
                try:
                    content = line.recv_bytes(MOST)  # type: ignore[union-attr]
                except (OSError, EOFError):
                    del asked[line]  # type: ignore[arg-type]
                    yield self._lost(name)
                    continue
                if _round_of(content) in (round_, None):
                    del asked[line]  # type: ignore[arg-type]
                good = content[:1] == b"+"
                why = "" if good else content[1:].decode(errors="replace")[:200]
                yield Answer(name, content[1:] if good else None, why)

    def _lost(self, name: str) -> Answer:
        self.to.pop(name, None)
        return Answer(name, None, "its connection was lost")


def _round_of(content: bytes) -> int | None:
    """Return the round of an answer; None where it does not say."""
    try:
        found = from_bytes(content[1:], most=MOST).about.get("round", -1)
    except Refused:
        return None
    return found if isinstance(found, int) else None


def run_server(plan: Plan, agreement: Agreement) -> None:
    """Be the server until the run is over or the process is killed.

    A new one goes on from the checkpoint.
    """
    lines = Lines(plan)
    lines.listen()
    there = set(agreement.names) - {
        name for name, first in plan.late.items() if first > _round_so_far(plan.folder)
    }
    lines.wait_for(there, 20.0)
    try:
        fit = fit_nodes(
            method(),
            agreement,
            lines.ask,
            rounds=plan.rounds,
            seed=SEED,
            fewest=2,
            checkpoint=plan.folder / "server",
            resume=True,
        )
    except TooFewNodes:
        os._exit(TOO_FEW)
    lines.wait_for(set(agreement.names), 20.0)
    (plan.folder / RESULT).write_text(json.dumps(found_by(fit)))


def _round_so_far(folder: Path) -> int:
    try:
        return int((folder / ROUND).read_text())
    except (OSError, ValueError):
        return -1


def found_by(fit: FitOverNodes) -> dict[str, Any]:
    """Return the posterior as JSON: of the server's site, and of the clients' by their nodes."""
    draws: Any = fit.posterior(4000, seed=1)
    loc = draws.posterior["loc"].values.reshape(-1, 2)
    own = fit.local_summary(4000, seed=1)
    table = own.table
    names = [f"{row.client} {row.site}" for row in table.itertuples()]
    history = fit.history[["round", "clients"]].to_dict("records")
    return {
        "mean": {**dict(zip(names, table["mean"], strict=True)), **_of(loc.mean(0))},
        "sd": {**dict(zip(names, table["sd"], strict=True)), **_of(loc.std(0, ddof=1))},
        "withheld": dict(own.withheld),
        "rounds": history,
        "left_out": [list(of) for of in fit.history["left_out"]],
        "factors": {k: v.tolist() for k, v in named_leaves(factors_of(fit)).items()},
    }


def _of(values: Any) -> dict[str, float]:
    return {f"loc[{k}]": float(v) for k, v in enumerate(values)}


def factors_of(fit: FitOverNodes) -> dict[str, torch.Tensor]:
    """Return the sum of all clients' factors, as the server has it."""
    state = fit.progress.server
    return dict(sub(state.q, state.prior)._asdict())
