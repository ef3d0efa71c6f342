"""What an answer costs the server, from one client to a million.

Run `python -m benchmarks.server_scale [--write]`.

Measures, on answers made here, the seconds and the memory in which a server over nodes reads,
checks and sums them, for models of several sizes; and what each node is told before the first
round, for several numbers of clients. From these it computes rounds of a million devices. `--write`
adds both to benchmarks/SCALE.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hierfl
from benchmarks.flower_scale_table import append
from hierfl import methods, models
from hierfl.core.trees import tree_map
from hierfl.nodes import Answer
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.messages import from_bytes, to_bytes
from hierfl.nodes.run import fit_nodes

ANSWERS = 2000
PARAMS = (1_000, 100_000, 1_000_000)  # float32 numbers of a model


def one_client(features: int) -> hierfl.ClientData:
    """Return a client of one row."""
    return hierfl.ClientData.from_arrays(["0"], x=torch.zeros(1, features), y=torch.zeros(1))


def measured(params: int, answers: int) -> dict[str, float]:
    """Ask for a round of made-up answers in this process, and return what it cost.

    Args:
        params: of the model.
        answers: clients of the round.

    Returns:
        Bytes to and from a client, seconds an answer, and memory that the round took, in MB.
    """
    net = nn.Linear(params, 1, bias=False)
    model = models.network(net, likelihood=models.likelihood.bernoulli())
    method = methods.fedavg(model, steps=1)
    told = Introduction.of(one_client(params))
    named = [Introduction(f"{k:07d}", 1, told.form, told.codes) for k in range(answers)]
    spent: dict[str, float] = {}

    def ask(contents: Mapping[str, bytes]) -> Iterator[Answer]:
        first = next(iter(contents.values()))
        asked = from_bytes(first, most=1 << 31)
        one = torch.ones(1)
        up = {
            "theta": (tree_map(lambda v: v[None], asked.tree["message"]), one),
            "loss": (one, one),
        }
        about = {"run": asked.about["run"], "round": 0}
        spent["down"], spent["up"] = len(first), len(to_bytes(up, {**about, "client": "0" * 7}))
        before = most = memory()
        making, began = 0.0, time.process_time()
        for client in contents:
            start = time.process_time()
            content = to_bytes(up, {**about, "client": client})
            most = max(most, memory())
            making += time.process_time() - start
            yield Answer(client, content)
        spent["seconds"] = (time.process_time() - began - making) / len(contents)
        spent["megabytes"] = most - before

    fit_nodes(method, Agreement.between(named), ask, rounds=1)
    return spent


def memory() -> float:
    """Return the memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def told(clients: int) -> int:
    """Return the bytes of what each node is told before the first round."""
    first = Introduction.of(one_client(20))
    named = [Introduction(f"{k:07d}", 20, first.form, first.codes) for k in range(clients)]
    return len(json.dumps(asdict(Agreement.between(named))).encode())


def in_own_process(params: int, answers: int) -> dict[str, float]:
    """Measure in a new process, whose memory is that of this round alone."""
    command = [sys.executable, "-m", "benchmarks.server_scale", "--params", str(params)]
    done = subprocess.run(
        [*command, "--answers", str(answers)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, compute, and print or write the section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=int)
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--write", action="store_true", help="add it to benchmarks/SCALE.md")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.params:
        print(json.dumps(measured(chosen.params, chosen.answers)))
        return
    rows: list[dict[str, Any]] = []
    for params in PARAMS:
        for answers in (100, 400) if params == PARAMS[-1] else (500, chosen.answers):
            rows.append({"params": params, "answers": answers, **in_own_process(params, answers)})
            print(rows[-1], flush=True)
    agreed = {clients: told(clients) for clients in (1_000, 10_000, 100_000)}
    append(rows, agreed, to_file=chosen.write)


if __name__ == "__main__":
    main()
