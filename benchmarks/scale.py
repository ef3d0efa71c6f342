"""Cost of the number of clients, and of the first round: `python -m benchmarks.scale [--quick]`.

Measures seconds per round for a growing number of clients at a fixed cohort, and the memory of a
round in which one client has a million rows beside ten thousand of two. Each size runs in its own
process, and the sizes take turns. Also measures the time from calling `fit` to the end of its first
round, first in a process that compiles and then in one that finds the compiled step on disk. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hierfl
from benchmarks.speed import Worker, fedavg, machine, respond, run_method
from benchmarks.workloads import WORKLOADS
from hierfl import methods, models

COHORT, ROWS, FEATURES = 50, 20, 20
Answers = dict[int, dict[str, float]]  # number of clients -> seconds per round and MB


def population(clients: int) -> hierfl.ClientData:
    """Return clients with `ROWS` rows each, so that only their number grows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients * ROWS, FEATURES, generator=g)
    return hierfl.ClientData.from_arrays(
        torch.arange(clients).repeat_interleave(ROWS), x=x, y=(x.sum(1) > 0).long()
    )


def serve(clients: int) -> None:
    """Run a worker process for the given number of clients.

    The method is pFedMe, whose clients keep their own weights, so that the stored client states
    grow as well.
    """
    torch.manual_seed(0)
    model = models.bayesian_network(
        nn.Sequential(nn.Linear(FEATURES, 50), nn.Tanh(), nn.Linear(50, 2)), prior_scale=1.0
    )
    respond(run_method(methods.pfedme(model, steps=10, batch_size=10), population(clients), COHORT))


def ragged(longest: int, others: int) -> None:
    """Print the seconds and the peak memory of a round with clients of very different lengths, as JSON."""
    counts = torch.tensor([longest] + [2] * others)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(int(counts.sum()), 4, generator=g)
    ids = torch.arange(others + 1).repeat_interleave(counts)
    data = hierfl.ClientData.from_arrays(ids, x=x, y=(x.sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    method = methods.pfedme(models.bayesian_network(net, prior_scale=1.0), steps=10, batch_size=20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    hierfl.fit(method, data, rounds=1, settings=hierfl.Settings(compile=False), progress=False)
    seconds = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    print(json.dumps({"rows": longest, "others": others, "seconds": seconds, "peak_mb": peak}))


def first_round() -> None:
    """Print how long `fit` takes until the end of W1's first round, in seconds, as JSON."""
    work = WORKLOADS["W1"]
    data, method = work.data(), fedavg(work)
    began = time.perf_counter()
    hierfl.fit(
        method,
        data,
        rounds=1,
        cohort=work.cohort,
        settings=hierfl.Settings(compile=True),
        progress=False,
    )
    print(json.dumps({"seconds": time.perf_counter() - began}))


def ask(*command: str, cache: str) -> subprocess.Popen[str]:
    """Start this module in another process, with the given folder as compile cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    own = [sys.executable, "-m", "benchmarks.scale", *command]
    return subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def measure(sizes: Sequence[int], turns: int) -> tuple[list[float], list[Answers]]:
    """Return the seconds of the first round, without and with a compile cache, and each turn's answers."""
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
    return starts, answers


def summary(sizes: Sequence[int], answers: Sequence[Answers]) -> tuple[Table, dict[int, Any]]:
    """Return the medians over turns for each size.

    As the table to print, and as JSON-compatible values.
    """
    table = Table(
        "clients",
        "s per round",
        f"ratio to {sizes[0]}",
        "memory, MB",
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
    return table, record


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Cost of the number of clients, and of the first round.",
    )
    parser.add_argument("--quick", action="store_true", help="up to 10,000 clients, three turns")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ragged", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args.serve)
    if args.ragged:
        return ragged(args.ragged, args.ragged // 100)
    if args.first:
        return first_round()
    sizes, turns = ([100, 1000, 10_000], 3) if args.quick else ([100, 1000, 10_000, 100_000], 9)
    (cold, cached), answers = measure(sizes, turns)
    longest = 100_000 if args.quick else 1_000_000
    with tempfile.TemporaryDirectory() as cache:
        said = ask("--ragged", str(longest), cache=cache).communicate()[0]
    uneven = json.loads(said.splitlines()[-1])
    table, record = summary(sizes, answers)
    console = Console(width=130)
    console.print(table)
    console.print(
        f"W1's first round, from the call of fit: {cold:.1f} s; "
        f"{cached:.1f} s in a process that finds the compiled step on disk"
    )
    console.print(
        f"one client of {uneven['rows']:,} rows beside {uneven['others']:,} of two, batches of 20: "
        f"{uneven['peak_mb']:.0f} MB above the data, {uneven['seconds']:.1f} s for fit of one round"
    )
    print(
        json.dumps(
            {
                "machine": machine(),
                "cold_s": round(cold, 2),
                "cached_s": round(cached, 2),
                "clients": record,
                "ragged": uneven,
            }
        )
    )
    return None


if __name__ == "__main__":
    main()
