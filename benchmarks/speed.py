"""Seconds per round, beside other ways to do the same work.

    python -m benchmarks.speed [W1 ...] [--quick] [--way WAY] [--peers DIR] [--write]

Every way runs in its own process. The ways take turns (A B C A B C ...), running a block of rounds
each, so that a busy minute of the machine affects all of them. A ratio compares blocks of the same
turn; the median over turns is shown. Ratios "to loop" are to the better of the plain PyTorch loops
with one thread and with two. The last line printed is one JSON object: way -> ratio_to_loop,
ratio_to_vmap_compile, seconds, rss_mb, compile_s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.reference_models import RADON
from benchmarks.workloads import WORKLOADS, Workload, plain_loop, radon_loop, vmapped
from hierfl import guides, methods, models
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin, rounds
from hierfl.method import Method
from hierfl.optimizers import SGD
from hierfl.program.supports import ScaleLink

RESULTS = Path(__file__).with_name("RESULTS.md")
BY_HAND = ("loop, 1 thread", "loop, 2 threads", "vmap, compiled")
SETTLED = (
    2  # untimed first rounds of each process: the first compiles, the second starts other processes
)


# ---------------------------------------------------------------------------------- ways
def fedavg(work: Workload) -> Method:
    """Return FedAvg, which has no prior."""
    return methods.fedavg(
        models.network(work.module()),
        optimizer=SGD(work.lr),
        steps=work.steps,
        batch_size=work.batch,
    )


def fedmap(work: Workload) -> Method:
    """Return MAP with a Gaussian prior on every weight, whose mean is the server's."""
    model = models.learned_prior_network(work.module(), prior=models.learned_priors.Isotropic(1.0))
    return methods.fedmap(
        model, optimizer=SGD(work.lr), steps=work.steps, unit="step", batch_size=work.batch
    )


def fedabml(work: Workload, *, link: ScaleLink = "exp") -> Method:
    """Return FedABML: a mean-field posterior of every weight, one draw, and the KL in closed form.

    Each mini-batch also takes a step on the prior. With the default link, scales are exponentials
    as in the paper.
    """
    model = models.bayesian_network(work.module(), prior_scale="learned", scale_link=link)
    guide = guides.mean_field(scale_link=link)
    return methods.fedabml(
        model,
        guide,
        optimizer=SGD(work.lr),
        draws=1,
        steps=work.steps,
        unit="step",
        batch_size=work.batch,
    )


def pfedme(work: Workload) -> Method:
    """Return pFedMe, which has PRIOR's inner loop."""
    model = models.bayesian_network(work.module(), prior_scale=1.0)
    return methods.pfedme(
        model,
        prox=work.lam,
        optimizer=SGD(work.lr),
        global_optimizer=SGD(work.lr),
        inner_steps=work.inner,
        steps=work.steps,
        batch_size=work.batch,
    )


def run_method(
    method: Method, data: hierfl.ClientData, cohort: int | None = None
) -> Iterator[None]:
    """Run rounds as `hierfl.fit` does, compiled and with their history; yield after each."""
    federation = replace(federate(method, data, seed=0, cohort=cohort), graphs=Graphs())
    for _ in rounds(federation, begin(federation), 10**9):
        yield


def radon() -> Iterator[None]:
    """Run W5: all 85 counties with all rows, a structured posterior, one joint step per round."""
    torch.set_default_dtype(torch.float32)
    method = methods.fedsvi(RADON.ways["structured_non_centered"].model, hierfl.guides.structured)
    yield from run_method(method, hierfl.datasets.radon())


Rounds = Callable[[], Iterator[None]]


def ways_of(name: str) -> dict[str, Rounds]:
    """Return the ways to do one workload, by name.

    Names that begin with "loop" are hand-written loops over clients.
    """
    if name == "W5":
        return {"loop, 1 thread": radon_loop, "loop, 2 threads": radon_loop, "structured": radon}
    work = WORKLOADS[name]
    own: dict[str, Callable[[Workload], Method]] = (
        {"pFedMe": pfedme} if name == "W4" else {"FedAvg": fedavg}
    )
    if name == "W1":
        own |= {
            "MAP": fedmap,
            "FedABML": fedabml,
            "FedABML, softplus": partial(fedabml, link="softplus"),
        }

    def ours(method: Callable[[Workload], Method]) -> Rounds:
        return lambda: run_method(method(work), work.data(), work.cohort)

    by_hand: dict[str, Rounds] = {
        "loop, 1 thread": lambda: plain_loop(work),
        "loop, 2 threads": lambda: plain_loop(work),
        "vmap, compiled": lambda: vmapped(work),
    }
    return by_hand | {way: ours(method) for way, method in own.items()}


# ------------------------------------------------------------------------------------------------
# processes
def serve(workload: str, way: str) -> None:
    """Run a worker process that does one way of a workload."""
    torch.set_num_threads(1 if way.endswith("1 thread") else 2)
    respond(ways_of(workload)[way]())


def respond(run: Iterator[None]) -> None:
    """Print the seconds of the first round.

    Then answer requests for more rounds, one per line of the input.

    A line is a number of rounds to run. The answer is one line of JSON: seconds per round, and
    memory in MB.
    """
    began = time.perf_counter()
    next(run)
    first = time.perf_counter() - began
    for _ in range(SETTLED - 1):
        next(run)
    print(json.dumps({"first": first}), flush=True)
    for line in sys.stdin:
        count = int(line)
        began = time.perf_counter()
        for _ in range(count):
            next(run)
        seconds = (time.perf_counter() - began) / count
        print(json.dumps({"seconds": seconds, "rss_mb": megabytes()}), flush=True)


def megabytes() -> float:
    """Return the peak memory of this process, plus the unshared memory of its child processes now, in MB."""
    own, me = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children")
    for child in children.read_text().split() if children.exists() else ():
        lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        own += sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    return own


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker process.

    Args:
        process: the process.
        first: seconds of its first round.
    """

    process: subprocess.Popen[str]
    first: float

    def ask(self, count: int) -> dict[str, float]:
        """Run a block of `count` rounds; return seconds per round and peak memory so far, in MB."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return _line(self.process)


def start(workload: str, way: str, cache: str) -> Worker:
    """Start a worker for one way, with the given compile cache, and wait until it has compiled."""
    command = [sys.executable, "-m", "benchmarks.speed", "--serve", workload, way]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    if way in BY_HAND:
        # The value is glibc's default. If any tunable is set, hierfl leaves the C library's
        # allocator alone.
        env["GLIBC_TUNABLES"] = "glibc.malloc.arena_test=8"
    else:
        env.setdefault("GOMP_SPINCOUNT", "1000")  # as the `hierfl` command does
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    return Worker(process, _line(process)["first"])


def _line(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"'{' '.join(process.args)}' ended with exit status {process.wait()}")  # type: ignore[arg-type]
    answer: dict[str, float] = json.loads(line)
    return answer


def peer(command: list[str], folder: Path) -> float:
    """Run another framework's script.

    Return the median seconds per round from its line RESULT {json}.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"'{' '.join(command)}' printed no line RESULT: {done.stderr[-500:]}")
    return float(json.loads(lines[-1].removeprefix("RESULT "))["median"])


def peers(folder: Path, workload: str) -> dict[str, list[str]]:
    """Return name -> command of the other frameworks that are installed in a folder.

    The folder holds their scripts, and their environments in `pfl/` and `flwr/`.
    """
    scripts = {
        "pfl, 1 thread": ("pfl", "pfl_sim.py", "1"),
        "pfl, 2 threads": ("pfl", "pfl_sim.py", "2"),
    }
    scripts["Flower simulation"] = ("flwr", "flower_sim.py", "")
    found = {}
    for name, (environment, script, threads) in scripts.items():
        python = folder / environment / "bin" / "python"
        if workload in ("W1", "W2", "W3") and python.exists():
            found[name] = [str(python), script, f"{workload}:5", *([threads] if threads else [])]
    return found


# ------------------------------------------------------------------------------------------------
# measuring
Times = dict[str, list[float]]


@dataclass(frozen=True, eq=False)
class Measured:
    """Measurements of one workload.

    Args:
        workload: name of the workload.
        seconds: way -> seconds per round in each turn.
        first: way -> seconds of the first round.
        rss_mb: way -> peak memory in MB.
    """

    workload: str
    seconds: Times
    first: dict[str, float]
    rss_mb: dict[str, float]

    def ratio(self, way: str, to: Sequence[str]) -> float:
        """Return the median over turns of a way's seconds, relative to the fastest of the ways `to`."""
        base = [min(turn) for turn in zip(*(self.seconds[name] for name in to), strict=True)]
        return statistics.median(s / b for s, b in zip(self.seconds[way], base, strict=True))

    def record(self) -> dict[str, dict[str, float | None]]:
        """Return JSON-compatible values, one entry for each way."""
        loops = [way for way in self.seconds if way.startswith("loop")]
        out: dict[str, dict[str, float | None]] = {}
        for way, seconds in self.seconds.items():
            median = statistics.median(seconds)
            by_vmap = (
                self.ratio(way, ["vmap, compiled"]) if "vmap, compiled" in self.seconds else None
            )
            out[f"{self.workload} {way}"] = {
                "ratio_to_loop": round(self.ratio(way, loops), 3),
                "ratio_to_vmap_compile": None if by_vmap is None else round(by_vmap, 3),
                "seconds": round(median, 4),
                "rss_mb": round(self.rss_mb[way]) if way in self.rss_mb else None,
                "compile_s": None
                if way in loops or way not in self.first
                else round(max(0.0, self.first[way] - median), 1),
            }
        return out


def measure(
    workload: str, *, turns: int, block: float, ways: Sequence[str] | None, others: Path | None
) -> Measured:
    """Time one workload: all ways take turns, `turns` times, with blocks of about `block` seconds.

    Args:
        workload: name of the workload.
        turns: number of turns.
        block: length of a block of rounds, in seconds.
        ways: names of the ways; None: all.
        others: folder of other frameworks' scripts and environments; None: none is timed.

    Returns:
        The measurements.
    """
    chosen = [way for way in ways_of(workload) if ways is None or way in ways]
    with tempfile.TemporaryDirectory() as cache:
        workers = {way: start(workload, way, cache) for way in chosen}
        counts = {
            way: max(1, round(block / worker.ask(1)["seconds"])) for way, worker in workers.items()
        }
        found: Times = {way: [] for way in chosen}
        rss: dict[str, float] = {}
        foreign = peers(others, workload) if others else {}
        for _ in range(turns):
            for way, worker in workers.items():
                answer = worker.ask(counts[way])
                found[way].append(answer["seconds"])
                rss[way] = answer["rss_mb"]
            for name, command in foreign.items():
                assert others is not None
                found.setdefault(name, []).append(peer(command, others))
        for worker in workers.values():
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            worker.process.wait()
    return Measured(workload, found, {way: worker.first for way, worker in workers.items()}, rss)


HEAD = (
    "way",
    "s per round",
    "ratio to loop",
    "(range)",
    "ratio to vmap, compiled",
    "first round, s",
    "memory, MB",
)


def rows(found: Measured) -> list[tuple[str, ...]]:
    """Return the cells of the table, one row for each way."""
    record, loops = found.record(), [way for way in found.seconds if way.startswith("loop")]
    best = [min(turn) for turn in zip(*(found.seconds[name] for name in loops), strict=True)]
    out: list[tuple[str, ...]] = []
    for way, seconds in found.seconds.items():
        of, each = (
            record[f"{found.workload} {way}"],
            [s / b for s, b in zip(seconds, best, strict=True)],
        )
        vmap, rss = of["ratio_to_vmap_compile"], of["rss_mb"]
        out.append((
            way,
            f"{of['seconds']:.4f}",
            f"{of['ratio_to_loop']:.2f}",
            f"{min(each):.2f}-{max(each):.2f}",
            "" if vmap is None else f"{vmap:.2f}",
            f"{found.first[way]:.1f}" if way in found.first else "",
            "" if rss is None else f"{rss:.0f}",
        ))  # fmt: skip
    return out


def machine() -> str:
    """Describe the machine and the versions that the seconds were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}, Python {platform.python_version()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def written(all_found: Sequence[Measured], load: float) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# Speed",
        "",
        f"Written by `python -m benchmarks.speed --write` on {machine()}; load before the run: "
        f"{load:.1f}.",
        "",
    ]
    lines += [
        "Ratios are medians over turns, of blocks of rounds that ran one after another. The loop "
        "is the",
        "better of the two loops in the same turn.",
    ]
    for found in all_found:
        lines += [
            "",
            f"## {found.workload}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|" + "---|" * len(HEAD),
        ]
        lines += [f"| {' | '.join(row)} |" for row in rows(found)]
    return "\n".join(lines) + "\n"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and fill in what --quick leaves open."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Seconds per round, beside other ways to do the same work.",
    )
    parser.add_argument("workload", nargs="*", metavar="W", help="W1 to W5; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="W1's FedAvg and MAP, two turns: under a minute"
    )
    parser.add_argument("--turns", type=int, default=5, help="number of turns of all ways")
    parser.add_argument(
        "--way", action="append", help="measure only this way (may be repeated), and the two loops"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="a folder of other frameworks' scripts and environments",
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables to {RESULTS.name}")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = [*WORKLOADS, "W5"]
    unknown = set(args.workload) - set(known)
    if unknown:
        parser.error(f"there is no workload {min(unknown)}; choose from {', '.join(known)}")
    if args.quick and not args.workload:
        args.workload, args.way = ["W1"], args.way or ["FedAvg", "MAP"]
    args.workload = args.workload or known
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    args = arguments(argv)
    if args.serve:
        serve(*args.serve)
        return
    load = os.getloadavg()[0]
    ways = ["loop, 1 thread", "loop, 2 threads", *args.way] if args.way else None
    console, all_found = Console(width=130), []
    record: dict[str, dict[str, float | None]] = {}
    for name in args.workload:
        found = measure(
            name,
            turns=2 if args.quick else args.turns,
            block=0.5 if args.quick else 2.0,
            ways=ways,
            others=args.peers,
        )
        table = Table(*HEAD, title=f"{name}: seconds per round", title_justify="left")
        for row in rows(found):
            table.add_row(*row)
        console.print(table)
        record |= found.record()
        all_found.append(found)
    if args.write:
        RESULTS.write_text(written(all_found, load))
    print(json.dumps({"machine": machine(), "load_before": round(load, 2), **record}))


if __name__ == "__main__":
    main()
