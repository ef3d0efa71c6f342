"""Fits in copies of one warm process, which can be killed.

What they answer, and the federation they run on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch

import hierfl
from hierfl.core.disk import CannotWrite
from hierfl.core.trees import named_leaves
from hierfl.engine.client_store import taken

# errors that hierfl raises on purpose; their messages name the mend
REFUSALS = (
    hierfl.CannotRemake,
    hierfl.CheckpointError,
    hierfl.FolderInUse,
    hierfl.RowsNotSaved,
    CannotWrite,
)
ROUNDS = 6


@dataclass(frozen=True)
class Outcome:
    """How a copy ended.

    Args:
        kind: "done", "refused", "raw" or "killed".
        text: a digest of its answer, or the error.
    """

    kind: str
    text: str = ""


def model(batch: Any) -> None:
    """Slopes that vary between clients, and Normal labels."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * slope).sum(-1), 1.0), obs=batch.y)


def federation() -> hierfl.ClientData:
    """Return five clients of two to seven rows."""
    g = torch.Generator().manual_seed(0)
    client = torch.repeat_interleave(torch.arange(5), torch.tensor([5, 3, 7, 2, 4]))
    x = torch.randn(len(client), 2, generator=g)
    y = x.sum(-1) + torch.randn(len(client), generator=g)
    return hierfl.ClientData.from_arrays(client, x=x, y=y)


def run(folder: Path | None, **options: Any) -> hierfl.Fit:
    """Fit the model, with a checkpoint every round, resumed where there is one."""
    asked = {
        "rounds": ROUNDS,
        "seed": 3,
        "cohort": 3,
        "checkpoint_every": 1,
        "settings": hierfl.Settings(compile=False),
        "resume": True,
    }
    method = hierfl.methods.fedsvi(model, batch_size=2, local_steps=1)
    return hierfl.fit(method, federation(), checkpoint=folder, **{**asked, **options})


def digest(fitted: hierfl.Fit) -> str:
    """Return a hash of everything a fit has inferred, and of its history but for the times."""
    clients = torch.arange(fitted.federation.data.num_clients)
    found = hashlib.sha256()
    for tree in (fitted.progress.server, taken(fitted.progress.table, clients)):
        for name, value in named_leaves(tree).items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    told = [{k: v for k, v in row.items() if k != "seconds"} for row in fitted.progress.history]
    found.update(json.dumps(told).encode())
    return found.hexdigest()


def answered(call: Callable[[], str]) -> Outcome:
    """Call a function that returns a digest, and say how it ended."""
    try:
        return Outcome("done", call())
    except Exception as error:
        # a plain ValueError of `fit` names the folder and the mend: it "already holds a run"
        expected = isinstance(error, REFUSALS) or (
            type(error) is ValueError and "resume=True" in str(error)
        )
        return Outcome("refused" if expected else "raw", f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Copy:
    """A copy of this process that calls a function.

    Args:
        process: its PID.
        line: where its outcome is read from.
    """

    process: int
    line: int

    def kill(self) -> None:
        """Kill the copy, as the system does where memory is short."""
        os.kill(self.process, signal.SIGKILL)

    def outcome(self) -> Outcome:
        """Wait until the copy has ended."""
        with os.fdopen(self.line) as file:
            told = file.read()
        os.waitpid(self.process, 0)
        return Outcome(**json.loads(told)) if told else Outcome("killed")


def copied(call: Callable[[], str]) -> Copy:
    """Make a copy of this process that calls a function and ends."""
    here, there = os.pipe()
    process = os.fork()
    if process:
        os.close(there)
        return Copy(process, here)
    try:
        outcome = answered(call)
        os.write(there, json.dumps(outcome.__dict__).encode()[:60_000])
    finally:
        os._exit(0)


def fast_folder() -> str | None:
    """Return a place in memory for files, where there is one.

    What is written survives SIGKILL there too.
    """
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def judged(outcome: Outcome, wanted: set[str]) -> str:
    """Return "right", "refused", "wrong" or "raw" for how a copy that was not killed ended."""
    if outcome.kind == "done":
        return "right" if outcome.text in wanted else "wrong"
    return "refused" if outcome.kind == "refused" else "raw"


def in_own_process(module: str, n: int, seed: int) -> dict[str, int]:
    """Run an attack in a fresh process on one thread, which can be forked safely, and return its counts."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", module, str(n), str(seed)]
    told = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(told.stdout.splitlines()[-1])
    return found


def run_attack(
    attack: Callable[[int, int], dict[str, int]], doc: str | None, arguments: Sequence[str] | None
) -> None:
    """Run an attack with the number and the seed of the command line, and print its counts as JSON."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("n", type=int, help="how often")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of what is random")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print(json.dumps(attack(asked.n, asked.seed)))
