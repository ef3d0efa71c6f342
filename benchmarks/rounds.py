"""Rounds and bytes until a posterior is right: `python -m benchmarks.rounds [NAME] [--write]`.

NAME is one of radon, hospitals, eight_schools, ilea and election88; none: all of them.
For each method: how many rounds, and bytes to and from all clients, until the mean of every entry of every global site is within
0.1 standard deviations of the reference's and stays there; then the errors of the last round's posterior, local sites and all.
Prints a table, and for one NAME as the last line a JSON object of fedlaplace's numbers. What was measured is kept in the user's
cache folder, and `--write` makes benchmarks/ROUNDS.md of what is kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.reference import Errors, cache, compare, truth_of
from benchmarks.reference_models import Problem, all_sites
from benchmarks.rounds_models import ALL
from hierfl.datasets import Summary
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Method
from hierfl.runs.result import Fit

WITHIN, LOOKS = 0.1, 2000  # draws at a look
BEST = {"eight_schools": "conditional_flow"}  # of fedsvi's ways; else "conditional"
# of PVI's factors; else 1 / N, with which 85 clients would take 400 rounds. On radon 0.5 ends in a product that is no distribution.
DAMPING = {"radon": 0.1, "ilea": 0.5, "election88": 0.5}
NAMES = ("fedlaplace", "pvi", "bfi", "fedsvi")
Record = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A method, rounds it may take, how many pass between two looks at its posterior, and draws of the last one."""

    method: Method
    rounds: int
    every: int = 1
    draws: int = 2000


def ways(problem: Problem) -> dict[str, Way]:
    """Name -> how each method fits a problem."""
    best = problem.ways[BEST.get(problem.name, "conditional")]
    adam = hierfl.optimisers.Adam(best.lr)
    svi = hierfl.methods.fedsvi(
        best.model,
        best.guide,
        optimiser=adam,
        local_optimiser=adam,
        num_particles=best.num_particles,
        average=best.average,
    )
    return {
        "fedlaplace": Way(
            hierfl.methods.fedlaplace(best.model), 12, draws=4000 if problem.source else 1000
        ),
        "pvi": Way(hierfl.methods.pvi(best.model, damping=DAMPING.get(problem.name)), 30, every=2),
        "bfi": Way(hierfl.methods.bfi(best.model), 1),
        "fedsvi": Way(svi, best.rounds, every=50),
    }


@dataclass(frozen=True)
class Course:
    """How a fit went.

    Args:
        reached: rounds until every global mean was near and stayed so; None: never.
        sent: bytes up and down until then, or until the end.
        errors: of the last posterior.
        rounds: in all.
        seconds: of the rounds.
    """

    reached: int | None
    sent: int
    errors: Errors
    rounds: int
    seconds: float

    def record(self) -> dict[str, Any]:
        """As JSON."""
        mean, (_, spread) = self.errors.of("mean"), self.errors.worst_sd()
        return {
            "rounds": self.reached,
            "bytes": self.sent,
            "rounds_in_all": self.rounds,
            "max_mean_error_sd": round(float(mean.max()), 4),
            "median_mean_error_sd": round(float(torch.as_tensor(mean).median()), 4),
            "worst_sd_ratio": round(spread, 4),
            "seconds": round(self.seconds, 1),
        }


def course(way: Way, problem: Problem, truth: Mapping[str, Summary], *, seed: int) -> Course:
    """Fit, looking at the posterior of the global sites on the way."""
    reached, spent = None, 0.0
    for fit in fits(way, problem, seed):
        spent = float(fit.history["seconds"].sum())
        near = global_error(fit, problem, truth) < WITHIN
        reached = (reached or fit.progress.round) if near else None
    history = fit.history.head(reached or len(fit.history))
    drawn = fit.draws(way.draws, seed=seed)
    errors = compare(problem.effects(all_sites(drawn.shared, drawn.own)), truth)
    sent = int(history["bytes_up"].sum() + history["bytes_down"].sum())
    return Course(reached, sent, errors, len(fit.history), spent)


def fits(way: Way, problem: Problem, seed: int) -> Iterator[Fit]:
    """The fit after every `way.every` rounds, and after the last."""
    federation = federate(way.method, problem.data(), seed=seed)
    fit = None
    for where in run_rounds(federation, begin(federation), way.rounds):
        fit = Fit(way.method, federation, where, way.rounds)
        if (
            where.round % way.every == 0
            and where.round < way.rounds
            and not federation.server.finished(where.server)
        ):
            yield fit
    if fit is not None:
        yield fit


def global_error(fit: Fit, problem: Problem, truth: Mapping[str, Summary]) -> float:
    """The largest error of a global site's mean, in reference standard deviations; one row of one client is enough to draw them."""
    data = fit.federation.data.select([0])
    row = replace(
        data,
        offsets=torch.tensor([0, 1]),
        fields={name: values[:1] for name, values in data.fields.items()},
    )
    one = replace(fit, federation=replace(fit.federation, data=row))
    one = replace(
        one,
        progress=replace(
            fit.progress, table=hierfl.trees.tree_map(lambda v: v[:1], fit.progress.table)
        ),
    )
    shared = one.draws(LOOKS).shared
    return float(
        compare(shared, {site: truth[site] for site in shared if site in truth}).of("mean").max()
    )


HEADINGS = (
    "method",
    "rounds",
    "bytes",
    "of rounds",
    "means off by, sd: max",
    "median",
    "worst sd ratio",
    "seconds",
)


def row(name: str, record: Record) -> tuple[str, ...]:
    """What a table says of one method."""
    if "stops" in record:
        return (name, "stops", *[""] * (len(HEADINGS) - 2))
    within = record["rounds"] or "never"
    values = (
        within,
        f"{record['bytes']:,}",
        record["rounds_in_all"],
        *(record[k] for k in ERRORS),
        record["seconds"],
    )
    return (name, *map(str, values))


ERRORS = ("max_mean_error_sd", "median_mean_error_sd", "worst_sd_ratio")


def table(problem: Problem, records: Mapping[str, Record]) -> Table:
    """A row a method."""
    out = Table(
        title=f"{problem.name}: until every global mean is within {WITHIN} sd ({machine()})"
    )
    for heading in HEADINGS:
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for name, record in records.items():
        out.add_row(*row(name, record))
    return out


def machine() -> str:
    """What the seconds were measured on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def measured(problem: Problem, name: str, way: Way, *, seed: int) -> Record:
    """How one method goes on a problem; a method that stops says why."""
    truth, console, began = truth_of(problem), Console(stderr=True, width=140), time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            record = course(way, problem, truth, seed=seed).record()
        except (RuntimeError, ValueError) as error:
            record = {"stops": str(error)}
            console.print(f"{problem.name}, {name} stops: {error}")
    for line in {str(w.message) for w in told}:
        console.print(f"{name}: {line}")
    console.print(
        f"{problem.name}, {name}: {time.perf_counter() - began:.0f} s with looking", style="dim"
    )
    return {**record, "machine": machine()}


def kept(problem: Problem) -> dict[str, Record]:
    """What was measured of a problem, from the cache."""
    file = cache() / f"rounds_{problem.name}.json"
    records: dict[str, Record] = json.loads(file.read_text()) if file.is_file() else {}
    return {name: records[name] for name in NAMES if name in records}


def run(problem: Problem, names: Sequence[str], *, seed: int) -> dict[str, Record]:
    """Measure some methods on a problem, and keep what was measured."""
    found = {}
    for name, way in ways(problem).items():
        if name in names:
            found[name] = measured(problem, name, way, seed=seed)
            cache().mkdir(parents=True, exist_ok=True)
            (cache() / f"rounds_{problem.name}.json").write_text(
                json.dumps({**kept(problem), **found}, indent=1)
            )
    Console(width=140).print(table(problem, found))
    return found


def write(found: Mapping[str, Mapping[str, Record]]) -> Path:
    """The tables of all problems as benchmarks/ROUNDS.md."""
    lines = [
        "# Rounds and bytes until a posterior is right",
        "",
        f"Until the mean of every entry of every global site is within {WITHIN} reference standard deviations and stays so; bytes",
        "to and from all clients until then (or until the end, where that is never). The errors are those of the posterior after the",
        "last round, local sites included, from 1,000 to 4,000 draws (0.03 to 0.016 sd of noise). Radon, hospitals and eight schools",
        "against long runs of Stan or NUTS, ilea and election88 against pooled NUTS of the same program. Written by",
        "`python -m benchmarks.rounds --write`. Seconds are wall clock, whatever else the machine was doing.",
    ]
    for problem, records in found.items():
        lines += [
            "",
            f"## {problem}",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        ]
        lines += ["| " + " | ".join(row(name, record)) + " |" for name, record in records.items()]
        lines += [
            f"| {name} | not measured |" + " |" * (len(HEADINGS) - 2)
            for name in NAMES
            if name not in records
        ]
        lines += [
            "",
            *(
                f"{name} stops: {record['stops']}\n"
                for name, record in records.items()
                if "stops" in record
            ),
        ]
        lines += [
            f"Measured on {where}."
            for where in sorted({record["machine"] for record in records.values()})
        ]
    file = Path(__file__).with_name("ROUNDS.md")
    file.write_text("\n".join(lines) + "\n")
    return file


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*ALL], help="the problem; none: all")
    parser.add_argument(
        "--method", action="append", choices=NAMES, help="only this one (may be repeated)"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="measure nothing: write benchmarks/ROUNDS.md of what is kept",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)
    if args.write:
        print(write({name: kept(problem) for name, problem in ALL.items()}))
        return
    found = {
        n: run(p, args.method or NAMES, seed=args.seed)
        for n, p in ALL.items()
        if args.name in (None, n)
    }
    if args.name and "fedlaplace" in found[args.name]:
        others = {name: record for name, record in found[args.name].items() if name != "fedlaplace"}
        print(json.dumps({**found[args.name]["fedlaplace"], "others": others}))


if __name__ == "__main__":
    main()
