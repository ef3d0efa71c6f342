"""Rounds and bytes until a posterior is right: `python -m benchmarks.rounds [radon | hospitals | eight_schools]`.

For each method: how many rounds, and bytes to and from all clients, until the mean of every entry of every global site is within
0.1 standard deviations of the reference's and stays there; then the errors of the last round's posterior, local sites and all.
Prints a table, and for one NAME as the last line a JSON object of fedlaplace's numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.reference import Errors, compare, truth_of
from benchmarks.reference_models import PROBLEMS, Problem, all_sites
from hierfl.datasets import Summary
from hierfl.engine import begin
from hierfl.engine import rounds as run_rounds
from hierfl.federation import federate
from hierfl.fitted import Fit
from hierfl.method import Method

WITHIN, DRAWS = 0.1, 4000
BEST = {"radon": "conditional", "hospitals": "conditional", "eight_schools": "conditional_flow"}  # of fedsvi's ways
NAMES = ("fedlaplace", "pvi", "bfi", "fedsvi")


@dataclass(frozen=True)
class Way:
    """A method, rounds it may take, and how many pass between two looks at its posterior."""

    method: Method
    rounds: int
    every: int = 1


def ways(problem: Problem) -> dict[str, Way]:
    """Name -> how each method fits a problem."""
    best = problem.ways[BEST[problem.name]]
    adam = hierfl.optimisers.Adam(best.lr)
    svi = hierfl.methods.fedsvi(
        best.model, best.guide, optimiser=adam, local_optimiser=adam, num_particles=best.num_particles, average=best.average
    )
    return {
        "fedlaplace": Way(hierfl.methods.fedlaplace(best.model), 12),
        "pvi": Way(hierfl.methods.pvi(best.model), 60, every=3),
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
    drawn = fit.draws(DRAWS, seed=seed)
    errors = compare(problem.effects(all_sites(drawn.shared, drawn.own)), truth)
    sent = int(history["bytes_up"].sum() + history["bytes_down"].sum())
    return Course(reached, sent, errors, len(fit.history), spent)


def fits(way: Way, problem: Problem, seed: int) -> Iterator[Fit]:
    """The fit after every `way.every` rounds, and after the last."""
    federation = federate(way.method, problem.data(), seed=seed)
    fit = None
    for where in run_rounds(federation, begin(federation), way.rounds):
        fit = Fit(way.method, federation, where, way.rounds)
        if where.round % way.every == 0 and where.round < way.rounds and not federation.server.finished(where.server):
            yield fit
    if fit is not None:
        yield fit


def global_error(fit: Fit, problem: Problem, truth: Mapping[str, Summary]) -> float:
    """The largest error of a global site's mean, in reference standard deviations; one client is enough to draw them."""
    one = replace(fit, federation=replace(fit.federation, data=fit.federation.data.select([0])))
    one = replace(one, progress=replace(fit.progress, table=hierfl.trees.tree_map(lambda v: v[:1], fit.progress.table)))
    shared = one.draws(DRAWS).shared
    return float(compare(shared, {site: truth[site] for site in shared if site in truth}).of("mean").max())


def table(problem: Problem, courses: Mapping[str, Course]) -> Table:
    """A row a method."""
    out = Table(
        title=f"{problem.name}: until every global mean is within {WITHIN} sd ({platform.machine()}, {platform.system()})"
    )
    for heading in ("method", "rounds", "bytes", "of rounds", "means off by, sd: max", "median", "worst sd ratio", "seconds"):
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for name, found in courses.items():
        r = found.record()
        values = (r["rounds"] or "never", f"{r['bytes']:,}", r["rounds_in_all"], *(r[k] for k in ERRORS), r["seconds"])
        out.add_row(name, *map(str, values))
    return out


ERRORS = ("max_mean_error_sd", "median_mean_error_sd", "worst_sd_ratio")


def run(problem: Problem, names: Sequence[str], *, seed: int) -> dict[str, Course]:
    """Measure some methods on a problem, and print the table."""
    truth, console, courses = truth_of(problem), Console(width=140), {}
    for name, way in ways(problem).items():
        if name in names:
            began = time.perf_counter()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    courses[name] = course(way, problem, truth, seed=seed)
                except (RuntimeError, ValueError) as error:
                    console.print(f"{name} stops: {error}")
            for line in {str(w.message) for w in told}:
                console.print(f"{name}: {line}")
            console.print(f"{name}: {time.perf_counter() - began:.0f} s with looking", style="dim")
    console.print(table(problem, courses))
    return courses


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*PROBLEMS], help="the problem; none: all")
    parser.add_argument("--method", action="append", choices=NAMES, help="only this one (may be repeated)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)
    found = {n: run(p, args.method or NAMES, seed=args.seed) for n, p in PROBLEMS.items() if args.name in (None, n)}
    if args.name and "fedlaplace" in found[args.name]:
        others = {name: c.record() for name, c in found[args.name].items() if name != "fedlaplace"}
        print(json.dumps({**found[args.name]["fedlaplace"].record(), "others": others}))


if __name__ == "__main__":
    main()
