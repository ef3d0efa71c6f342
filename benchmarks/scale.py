"""What a federation's size costs, and a start: `python -m benchmarks.scale [--quick]`.

Seconds a round at a fixed cohort as the number of clients grows, each size in a process of its own, the sizes taking turns; and
the time from calling `fit` to the end of its first round, in one process that compiles and in the next, which finds the compiled
step on disk. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hierfl
from benchmarks.speed import Worker, fedavg, machine, respond, run_method
from benchmarks.workloads import WORKLOADS
from hierfl import methods, models

COHORT, ROWS, FEATURES = 50, 20, 20


def population(clients: int) -> hierfl.ClientData:
    """Clients of equal size; all that grows is their number."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients * ROWS, FEATURES, generator=g)
    return hierfl.ClientData.from_arrays(
        torch.arange(clients).repeat_interleave(ROWS), x=x, y=(x.sum(1) > 0).long()
    )


def serve(clients: int) -> None:
    """A worker: clients keep weights of their own (pFedMe), so that the table of what they keep grows too."""
    torch.manual_seed(0)
    model = models.bayesian_network(
        nn.Sequential(nn.Linear(FEATURES, 50), nn.Tanh(), nn.Linear(50, 2)), prior_scale=1.0
    )
    respond(run_method(methods.pfedme(model, steps=10, batch_size=10), population(clients), COHORT))


def first_round() -> None:
    """Say how long `fit` takes to end W1's first round."""
    work = WORKLOADS["W1"]
    data, method = work.data(), fedavg(work)
    began = time.perf_counter()
    hierfl.fit(method, data, rounds=1, cohort=work.cohort, compile=True, progress=False)
    print(json.dumps({"seconds": time.perf_counter() - began}))


def ask(*command: str, cache: str) -> subprocess.Popen[str]:
    """This module in another process."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    own = [sys.executable, "-m", "benchmarks.scale", *command]
    return subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description="What clients, and a start, cost."
    )
    parser.add_argument("--quick", action="store_true", help="up to 10,000 clients, three turns")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args.serve)
    if args.first:
        return first_round()
    sizes, turns = ([100, 1000, 10_000], 3) if args.quick else ([100, 1000, 10_000, 100_000], 9)
    with tempfile.TemporaryDirectory() as cache:
        starts = [
            json.loads(ask("--first", cache=cache).communicate()[0].splitlines()[-1])["seconds"]
            for _ in range(2)
        ]
        workers = {}
        for size in sizes:
            process = ask("--serve", str(size), cache=cache)
            assert process.stdout is not None
            workers[size] = Worker(process, json.loads(process.stdout.readline())["first"])
        answers = [{size: worker.ask(10) for size, worker in workers.items()} for _ in range(turns)]
        for worker in workers.values():
            worker.process.kill()
    table = Table(
        "clients",
        "s a round",
        "of that with 100",
        "MB",
        title=f"pFedMe, a cohort of {COHORT}",
        title_justify="left",
    )
    record = {}
    for size in sizes:
        seconds = statistics.median(answer[size]["seconds"] for answer in answers)
        ratio = statistics.median(
            answer[size]["seconds"] / answer[sizes[0]]["seconds"] for answer in answers
        )
        rss = answers[-1][size]["rss_mb"]
        table.add_row(f"{size:,}", f"{seconds:.4f}", f"{ratio:.2f}", f"{rss:.0f}")
        record[size] = {
            "seconds": round(seconds, 4),
            "ratio": round(ratio, 3),
            "rss_mb": round(rss),
        }
    console = Console(width=130)
    console.print(table)
    console.print(
        f"W1's first round, from the call of fit: {starts[0]:.1f} s, and {starts[1]:.1f} s by a process that finds it compiled"
    )
    print(
        json.dumps(
            {
                "machine": machine(),
                "cold_s": round(starts[0], 2),
                "cached_s": round(starts[1], 2),
                "clients": record,
            }
        )
    )
    return None


if __name__ == "__main__":
    main()
