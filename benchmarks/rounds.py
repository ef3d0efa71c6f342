"""Rounds and bytes until a posterior is accurate: `python -m benchmarks.rounds [NAME] [--write]`.

NAME is one of radon, radon_uniform, hospitals, eight_schools, ilea and election88; without it, all of them
are measured. A posterior is accurate once the mean of every entry of every global site is within 0.1
reference standard deviations of the reference mean, and stays so. For each method the benchmark counts the
rounds until then and the bytes sent to and from all clients, and then measures the errors of the last round's
posterior, local sites included.

Prints a table, and if NAME is given, as the last line a JSON object of fedlaplace's numbers. Results are
saved in the user's cache folder, and `--write` makes benchmarks/ROUNDS.md from the saved results.
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
from hierfl.core.trees import tree_map
from hierfl.datasets import Summary
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Method
from hierfl.runs.result import Fit

WITHIN = 0.1  # allowed error of a global mean, in reference standard deviations
LOOKS = 2000  # posterior draws by which the global means are checked during a fit
BEST = {
    "eight_schools": "conditional_flow"
}  # the best of fedsvi's ways; "conditional" if not listed
# Damping of PVI's factors. The default, 1 / N, would take 400 rounds with 85 clients. On radon, 0.5 leads to
# a product of factors that is not a distribution.
DAMPING = {"radon": 0.1, "ilea": 0.5, "election88": 0.5}
NAMES = ("fedlaplace", "pvi", "bfi", "fedsvi")
Record = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A method, and how its course is measured.

    Args:
        method: the method.
        rounds: most rounds that it may take.
        every: rounds between two checks of the global means.
        draws: posterior draws after the last round.
    """

    method: Method
    rounds: int
    every: int = 1
    draws: int = 2000


def ways(problem: Problem) -> dict[str, Way]:
    """Return name -> how each method fits the problem."""
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
    """Measured course of a fit.

    Args:
        reached: rounds until every global mean was within `WITHIN` and stayed so; None: never.
        sent: bytes to and from all clients until then, or until the last round.
        errors: errors of the posterior after the last round.
        rounds: rounds in all.
        seconds: wall-clock time of the rounds, in seconds.
    """

    reached: int | None
    sent: int
    errors: Errors
    rounds: int
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the course as JSON-compatible values."""
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
    """Fit a problem, checking the posterior of the global sites every `way.every` rounds."""
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
    """Yield the fit after every `way.every` rounds, and after the last."""
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
    """Return the largest error of a global site's mean, in reference standard deviations.

    Draws of the global sites do not depend on the rows, so the fit is cut to one row of one client to save
    time.
    """
    data = fit.federation.data.select([0])
    row = replace(
        data,
        offsets=torch.tensor([0, 1]),
        fields={name: values[:1] for name, values in data.fields.items()},
    )
    one = replace(fit, federation=replace(fit.federation, data=row))
    one = replace(
        one,
        progress=replace(fit.progress, table=tree_map(lambda v: v[:1], fit.progress.table)),
    )
    shared = one.draws(LOOKS).shared
    return float(
        compare(shared, {site: truth[site] for site in shared if site in truth}).of("mean").max()
    )


HEADINGS = (
    "method",
    "rounds to target",
    "bytes to target",
    "rounds run",
    "error of means, sd: max",
    "median",
    "worst sd ratio",
    "seconds",
)


def row(name: str, record: Record) -> tuple[str, ...]:
    """Return the cells of one method's row."""
    if "stops" in record:
        return (name, "failed", *[""] * (len(HEADINGS) - 2))
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
    """Return the table to print, one row for each method."""
    out = Table(
        title=f"{problem.name}: target is every global mean within {WITHIN} sd ({machine()})"
    )
    for heading in HEADINGS:
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for name, record in records.items():
        out.add_row(*row(name, record))
    return out


def machine() -> str:
    """Describe the machine that the seconds were measured on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def measured(problem: Problem, name: str, way: Way, *, seed: int) -> Record:
    """Measure one method on a problem; if the fit fails, record its error message instead."""
    truth, console, began = truth_of(problem), Console(stderr=True, width=140), time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            record = course(way, problem, truth, seed=seed).record()
        except (RuntimeError, ValueError) as error:
            record = {"stops": str(error)}
            console.print(f"{problem.name}, {name} failed: {error}")
    for line in {str(w.message) for w in caught}:
        console.print(f"{name}: {line}")
    console.print(
        f"{problem.name}, {name}: {time.perf_counter() - began:.0f} s including checks", style="dim"
    )
    return {**record, "machine": machine()}


def kept(problem: Problem) -> dict[str, Record]:
    """Return the saved results of a problem, by method."""
    file = cache() / f"rounds_{problem.name}.json"
    records: dict[str, Record] = json.loads(file.read_text()) if file.is_file() else {}
    return {name: records[name] for name in NAMES if name in records}


def run(problem: Problem, names: Sequence[str], *, seed: int) -> dict[str, Record]:
    """Measure the named methods on a problem, save the results and print the table."""
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


INTRODUCTION = [
    "# Rounds and bytes until a posterior is accurate",
    "",
    "The target is that the mean of every entry of every global site is within",
    f"{WITHIN} reference standard deviations (sd) of the reference mean, and stays so.",
    "",
    "* **rounds to target**, **bytes to target**: rounds until the target is reached, and bytes to",
    "  and from all clients until then. If it is never reached, the bytes are those of all rounds.",
    "* **rounds run**: rounds in all.",
    "* **error of means**, **worst sd ratio**: errors of the posterior after the last round, local",
    "  sites included, from 1,000 to 4,000 draws (0.03 to 0.016 sd of noise).",
    "* **seconds**: wall-clock time of the rounds, whatever else the machine was doing.",
    "",
    "The references of radon, hospitals and eight schools are long runs of Stan or NUTS; those of",
    "ilea and election88 are pooled NUTS of the same program. Written by",
    "`python -m benchmarks.rounds --write`.",
]


def section(problem: str, records: Mapping[str, Record]) -> list[str]:
    """Return one problem's section of benchmarks/ROUNDS.md, line by line."""
    return [
        "",
        f"## {problem}",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        *("| " + " | ".join(row(name, record)) + " |" for name, record in records.items()),
        *(
            f"| {name} | not measured |" + " |" * (len(HEADINGS) - 2)
            for name in NAMES
            if name not in records
        ),
        "",
        *(
            f"{name} failed: {record['stops']}\n"
            for name, record in records.items()
            if "stops" in record
        ),
        *(
            f"Measured on {where}."
            for where in sorted({record["machine"] for record in records.values()})
        ),
    ]


def write(found: Mapping[str, Mapping[str, Record]]) -> Path:
    """Write the tables of all problems to benchmarks/ROUNDS.md; return its path."""
    lines = [*INTRODUCTION]
    for problem, records in found.items():
        lines += section(problem, records)
    file = Path(__file__).with_name("ROUNDS.md")
    file.write_text("\n".join(lines) + "\n")
    return file


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*ALL], help="name of the problem; default: all")
    parser.add_argument(
        "--method",
        action="append",
        choices=NAMES,
        help="measure only this method (may be repeated)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="measure nothing; write benchmarks/ROUNDS.md from the saved results",
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
