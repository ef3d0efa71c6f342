"""Rounds and bytes until a posterior is accurate: `python -m benchmarks.rounds [NAME] [--write]`.

NAME is one of the problems of `benchmarks.rounds_models`; without it, all of them are measured. A
posterior is accurate once the mean of every entry of every global site is within 0.1 reference
standard deviations of the reference mean, and stays so. For each method the benchmark counts the
rounds until then and the bytes sent to and from all clients, and then measures the errors of the
last round's posterior, local sites included. Beside them stand the seconds of NUTS on all rows
together (`benchmarks.pooled_nuts`).

Prints a table, and if NAME is given, as the last line a JSON object of two_stage's numbers. Results
are saved in the user's cache folder, and `--write` makes benchmarks/ROUNDS.md from the saved
results.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import hierfl
from benchmarks.course import Way, accuracy, course, errors_of_summary
from benchmarks.pooled_nuts import NoNumpyro, timed, truth_of
from benchmarks.reference import cache
from benchmarks.reference_models import PROBLEMS, Problem
from benchmarks.rounds_models import ALL, LARGE
from benchmarks.rounds_table import POOLED, Record, machine, table, write
from hierfl.method import Method
from hierfl.program.sites import Model

BEST = {
    "eight_schools": "conditional_flow"
}  # the best of fedsvi's ways; "conditional" if not listed
# Damping of PVI's factors. The default, 1 / N, would take 400 rounds with 85 clients. On radon, 0.5
# leads to a product of factors that is not a distribution.
DAMPING = {"radon": 0.1, "ilea": 0.5, "election88": 0.5}
NAMES = ("two_stage", "fedlaplace", "pvi", "bfi", "fedsvi")
SELF_STOPPING = {"two_stage": 20, "fedlaplace": 12}  # methods that end by themselves -> most rounds
REAL = (*PROBLEMS, *LARGE, "demo")  # every method is measured on these, SELF_STOPPING on the others


def method_of(name: str, model: Model, **options: Any) -> Method:
    """Return the method of that name in `hierfl.methods`."""
    return getattr(hierfl.methods, name)(model, **options)


def best_of(problem: Problem) -> Any:
    """Return the way in which fedsvi fits the problem best; its program is every method's."""
    return problem.ways[BEST.get(problem.name, "conditional")]


def way_of(problem: Problem, name: str) -> Way:
    """Return how the named method fits the problem."""
    best = best_of(problem)
    if name in SELF_STOPPING:
        method = method_of(name, best.model)
        draws = 1000 if problem.name in LARGE else 4000 if name == "fedlaplace" else 8000
        return Way(method, SELF_STOPPING[name], draws=draws, cut=name == "fedlaplace")
    if name == "pvi":
        pvi = hierfl.methods.pvi(best.model, damping=DAMPING.get(problem.name))
        return Way(pvi, 30, every=2)
    if name == "bfi":
        return Way(hierfl.methods.bfi(best.model), 1)
    adam = hierfl.optimizers.Adam(best.lr)
    svi = hierfl.methods.fedsvi(
        best.model,
        best.guide,
        optimizer=adam,
        local_optimizer=adam,
        draws=best.num_particles,
        average=best.average,
    )
    return Way(svi, best.rounds, every=50)


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


def pooled(problem: Problem) -> dict[str, Record]:
    """Return the row of pooled NUTS; none where it was not run and NumPyro is missing."""
    try:
        found = timed(problem)
    except NoNumpyro:
        return {}
    errors = accuracy(errors_of_summary(found.sites, truth_of(problem)))
    own = {"effective": round(found.effective), "seconds": round(found.seconds, 1)}
    return {POOLED: {**errors, **own}}


def kept(problem: Problem) -> dict[str, Record]:
    """Return the saved results of a problem, by method."""
    file = cache() / f"rounds_{problem.name}.json"
    records: dict[str, Record] = json.loads(file.read_text()) if file.is_file() else {}
    return {name: records[name] for name in NAMES if name in records}


def names_of(problem: Problem) -> tuple[str, ...]:
    """Return the methods that are measured on a problem."""
    return tuple(name for name in NAMES if problem.name in REAL or name in SELF_STOPPING)


def run(problem: Problem, names: Sequence[str], *, seed: int) -> dict[str, Record]:
    """Measure the named methods on a problem, save the results and print the table."""
    found: dict[str, Record] = {}
    for name in names:
        found[name] = measured(problem, name, way_of(problem, name), seed=seed)
        cache().mkdir(parents=True, exist_ok=True)
        (cache() / f"rounds_{problem.name}.json").write_text(
            json.dumps({**kept(problem), **found}, indent=1)
        )
    Console(width=160).print(table(problem.name, {**found, **pooled(problem)}))
    return found


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
        saved = {name: kept(problem) for name, problem in ALL.items()}
        print(write({n: {**found, **pooled(ALL[n])} for n, found in saved.items() if found}))
        return
    found = {
        n: run(p, args.method or names_of(p), seed=args.seed)
        for n, p in ALL.items()
        if args.name in (None, n)
    }
    first = next((n for n in SELF_STOPPING if args.name and n in found[args.name]), None)
    if first:
        others = {name: record for name, record in found[args.name].items() if name != first}
        print(json.dumps({**found[args.name][first], "others": others}))


if __name__ == "__main__":
    main()
