"""CPU seconds of `hierfl.fit` beside pooled NUTS by NumPyro: `python -m benchmarks.seconds [NAME ...]`.

Each problem has two processes of its own, one after the other: `hierfl.fit` and 4,000 draws, and
NUTS as a user would run it, two chains of 500 + 1,000 steps. Seconds are CPU seconds, imports and
first calls included; bytecode is there, and what the benchmark itself imports does not count.
`HIERFL_NUMPYRO` names a Python with NumPyro, `HIERFL_DATA` the folder of the data that do not ship.
`counties` is simulated: 386 clients, 12,573 rows, an intercept and a slope each, without NUTS.
`--hard` makes another table, of the problems of `benchmarks.hard_problems`, with NUTS after each fit
where no seconds are asked: of all numbers of all sites, the mean furthest from NUTS's, in its sds, and
the ratio of sds furthest from 1, by the answers that `benchmarks.zoo` keeps where it has the problem.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

import hierfl
from benchmarks.formula_problems import PROBLEMS as FORMULAS
from benchmarks.hard_problems import HARD
from benchmarks.pooled_nuts import ROOT, USER, has_numpyro, in_own_process, python
from benchmarks.rounds import best_of
from benchmarks.rounds_models import ALL
from benchmarks.textbook_problems import ZOO
from benchmarks.zoo.__main__ import apart, kept_answers, moments_of, sampled
from benchmarks.zoo.reading import program_of

# CPU seconds asked of each problem
ASKED = {
    **{"radon": 4.0, "hospitals": 3.5, "eight_schools": 2.0, "ilea": 4.5, "election88": 7.0},
    **{"trauma": 3.5, "nurses": 5.0, "lung": 6.0, "demo": 11.0, "counties": 5.0},
}
IMPORTS = "import time, hierfl; hierfl.fit{more}; print(time.process_time())"
COUNTIES, ROWS = 386, 12_573


def counties() -> pd.DataFrame:
    """Return simulated rows of counties with intercepts and slopes of their own."""
    rng = np.random.default_rng(0)
    county = np.sort(rng.integers(COUNTIES, size=ROWS))
    own, x = rng.standard_normal((2, COUNTIES)) * [[0.4], [0.2]], rng.standard_normal(ROWS)
    y = 1.0 + own[0, county] + (0.5 + own[1, county]) * x + 0.8 * rng.standard_normal(ROWS)
    return pd.DataFrame({"y": y, "x": x, "county": county})


def given(name: str) -> tuple[Any, Any]:
    """Return the program or formula of a problem, and its rows."""
    if name == "counties":
        return hierfl.formula(
            "y ~ x + (1 | county) + (0 + x | county)", clients="county"
        ), counties()
    if name in FORMULAS and name not in ALL:
        frame = FORMULAS[name].frame()
        return FORMULAS[name].model(frame), frame
    return best_of(ALL[name]).model, ALL[name].data()


def fitted(name: str) -> dict[str, float]:
    """Fit a problem in this process."""
    torch.set_num_threads(1)
    model, rows = given(name)
    began = time.process_time()
    fit = hierfl.fit(model, rows, seed=0, progress=False)
    ended = time.process_time()
    fit.draws(4000)
    return {
        "rounds": len(fit.history),
        "fit": ended - began,
        "draws": time.process_time() - ended,
        "k_hat": float(fit.history["k_hat"].iloc[-1]),
    }


def hard(name: str) -> dict[str, Any]:
    """Fit a hard problem in this process; `memory` is what its peak adds, in GB."""
    torch.set_num_threads(1)
    model, rows = HARD[name].problem()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    fit = hierfl.fit(model, rows, seed=0, progress=False)
    fitted = time.process_time()
    summary = fit.summary()
    summarized = time.process_time()
    fit.posterior(1000)
    history, peak = fit.history, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rounds": len(history),
        "k_hat": float(history["k_hat"].iloc[-1]) if "k_hat" in history else float("nan"),
        "fit": fitted - began,
        "summary": summarized - fitted,
        "draws": time.process_time() - summarized,
        "memory": (peak - before) / 2**20,
        "verdict": summary.verdict.partition(".")[0],
        "sites": moments_of(fit, logs(name)),
    }


def logs(name: str) -> Sequence[str]:
    """Return the sites of a hard problem that have no variance, and are compared by their logs."""
    return getattr(program_of(name), "LOGS", ()) if name in ZOO else ()


def print_hard(names: Sequence[str]) -> None:
    """Print the table of hard problems, with NUTS after each fit where it says what is asked."""
    print(
        "| problem | rounds | k-hat | fit, CPU s | asked, or NUTS | summary() | asked | posterior(1000) "
        "| asked | GB | worst mean, sd | worst sd ratio | verdict |"
    )
    print("|---|" + "---:|" * 9 + "---|---|---|")
    for name in names or HARD:
        v = json.loads(run_alone("-m", "benchmarks.seconds", "--hard", "--one", name))
        asked, bound, away = HARD[name], f"{HARD[name].fit}", " | "
        if asked.fit is None:
            nuts = hard_by_nuts(name)
            bound = f"NUTS {nuts.seconds:.1f}, R-hat {nuts.r_hat:.2f}"
            kept = kept_answers().get(name) if name in ZOO else None
            worst = apart(v["sites"], nuts.sites if kept is None else kept["sites"])
            away = f"{worst.mean:.2f} ({worst.mean_site}) | {worst.ratio:.2f} ({worst.ratio_site})"
        print(
            f"| {name} | {v['rounds']} | {v['k_hat']:.2f} | {v['fit']:.1f} | {bound} "
            f"| {v['summary']:.1f} | {asked.summary:.1f} | {v['draws']:.1f} | {asked.draws:.1f} "
            f"| {v['memory']:.2f} | {away} | {v['verdict']} |",
            flush=True,
        )


class ByNuts(NamedTuple):
    """NUTS's CPU seconds, compiling included, the worst R-hat, and mean and sd of each site's numbers."""

    seconds: float
    r_hat: float
    sites: dict[str, dict[str, Any]]


def hard_by_nuts(name: str) -> ByNuts:
    """Sample a hard problem by NUTS in a process of its own."""
    if name not in ZOO:
        formula, frame = HARD[name].problem()
        return by_nuts_of_formula(formula.on(frame), frame)
    answer = sampled(name, *USER)
    return ByNuts(answer["seconds"], answer["r_hat"], answer["sites"])


def run_alone(*command: str) -> str:
    """Run Python in a process of one thread, and return the last line that it prints."""
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    one.pop("PYTHONDONTWRITEBYTECODE", None)
    ran = subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, text=True, env=one
    )
    return ran.stdout.splitlines()[-1]


def by_nuts(name: str) -> float | None:
    """Return the CPU seconds of NUTS in a process of its own, or None where it has no program."""
    if name == "counties":
        return None
    if name not in ALL:
        return by_nuts_of_formula(*given(name)).seconds
    with tempfile.TemporaryDirectory() as folder:
        began = of_children()
        in_own_process(ALL[name], Path(folder), *USER)
        return of_children() - began


def by_nuts_of_formula(formula: Any, frame: Any) -> ByNuts:
    """Sample a formula's printed program by NUTS in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / of for of in ("program.py", "rows.npz", "out.npz")]
        batch = hierfl.full_batch(formula.data(frame))
        files[0].write_text(formula.program())
        rows: dict[str, Any] = {
            n: v.numpy() for n, v in {**batch.fields, **batch.client_fields}.items()
        }
        np.savez(files[1], present=batch.mask().numpy(), **rows)
        call = [python(), "-m", "benchmarks.formula_sampler", *map(str, files)]
        began = of_children()
        subprocess.run([*call, *USER], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds = of_children() - began
        with np.load(files[2]) as archive:
            numbers = dict(archive)
    sites: dict[str, dict[str, Any]] = {}
    for key, values in numbers.items():
        site, _, moment = key.partition("/")
        if moment in ("mean", "sd"):
            sites.setdefault(site, {})[moment] = values.ravel().tolist()
    return ByNuts(seconds, float(numbers["r_hat"]), sites)


def of_children() -> float:
    """Return the CPU seconds of the processes that this one has run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, a row for each problem."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seconds", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ASKED)}")
    parser.add_argument("--hard", action="store_true", help=f"of {', '.join(HARD)} instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.hard:
        if args.one:
            print(json.dumps(hard(args.one)))
        else:
            print_hard(args.names)
        return
    if args.one:
        print(json.dumps(fitted(args.one)))
        return
    print(
        "| problem | rounds | k-hat | fit, CPU s | asked | 4,000 draws, CPU s | NUTS, CPU s | ratio |"
    )
    print("|---|" + "---:|" * 7)
    nuts = has_numpyro()
    run_alone("-c", IMPORTS.format(more=", hierfl.formula"))
    for name in args.names or ASKED:
        more = "" if name in ALL else ", hierfl.formula"
        imports = float(run_alone("-c", IMPORTS.format(more=more)))
        v = json.loads(run_alone("-m", "benchmarks.seconds", "--one", name))
        seconds = imports + v["fit"]
        other = by_nuts(name) if nuts else None
        beside = "none | " if other is None else f"{other:.1f} | {other / seconds:.1f}"
        print(
            f"| {name} | {v['rounds']} | {v['k_hat']:.2f} | {seconds:.1f} | {ASKED[name]:.1f} "
            f"| {v['draws']:.2f} | {beside} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
