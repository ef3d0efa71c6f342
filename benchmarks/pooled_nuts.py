"""What a user would do who may pool: NUTS on all rows, by NumPyro.

Run `python -m benchmarks.pooled_nuts [NAME ...]`.

Runs two chains of 500 + 1,000 steps in a process of its own, and keeps the seconds and the mean and
sd of each site in the user's cache folder. The reference of a problem that has no published one is
a longer run, two chains of 1,000 + 10,000 steps. NumPyro is an optional extra of the benchmarks:
`pip install numpyro`. Where another Python has it, HIERFL_NUMPYRO names that Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.radon_exact import scales
from benchmarks.reference import agreement, cache, cached_nuts
from benchmarks.reference_models import Problem
from benchmarks.rounds_models import ALL
from hierfl import ClientData
from hierfl.datasets import ReferenceSummary

VARIABLE = "HIERFL_NUMPYRO"
ROOT = Path(__file__).resolve().parents[1]


class NoNumpyro(RuntimeError):
    """NumPyro cannot be imported by the Python that would run it."""


@dataclass(frozen=True)
class Timed:
    """Pooled NUTS of a problem.

    Args:
        sites: site -> mean, sd and Monte Carlo standard error.
        seconds: from the start of compiling to the last draw, both chains side by side.
        r_hat: largest split R-hat of any number.
        effective: fewest effective draws of any number.
        diverging: divergent transitions.
    """

    sites: Mapping[str, ReferenceSummary]
    seconds: float
    r_hat: float
    effective: float
    diverging: int


def python() -> str:
    """Return the Python that has NumPyro: that of HIERFL_NUMPYRO, or else this one."""
    return os.environ.get(VARIABLE) or sys.executable


def has_numpyro() -> bool:
    """Return whether `python()` can import NumPyro."""
    looked = [
        python(),
        "-c",
        "import importlib.util as u, sys; sys.exit(u.find_spec('numpyro') is None)",
    ]
    try:
        return subprocess.run(looked, capture_output=True).returncode == 0
    except OSError:  # there is no such Python
        return False


def rows_of(data: ClientData) -> dict[str, Any]:
    """Return the rows of all clients as arrays, as `benchmarks.numpyro_programs` reads them."""
    fields = {**data.fields, **data.client_fields}
    values = {
        name: (v.double() if v.is_floating_point() else v).numpy() for name, v in fields.items()
    }
    return {**values, "client": data.row_client.numpy(), "clients": data.num_clients}


def in_own_process(problem: Problem, folder: Path, *options: str) -> dict[str, Any]:
    """Run `benchmarks.numpyro_sampler` on a problem, and return what it saved.

    Args:
        problem: the problem.
        folder: for the rows and the answer.
        *options: of the command line.

    Raises:
        NoNumpyro: NumPyro is not installed.
        RuntimeError: the process failed.
    """
    if not has_numpyro():
        raise NoNumpyro(
            f"NumPyro is not installed in {python()}, and pooled NUTS is run by it: `pip install "
            f"numpyro`, or set {VARIABLE} to a Python that has it"
        )
    rows, out = folder / "rows.npz", folder / "out.npz"
    np.savez(rows, **rows_of(problem.data()))
    command = [python(), "-m", "benchmarks.numpyro_sampler", problem.name, str(rows), str(out)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pooled NUTS of {problem.name} failed: {done.stderr[-2000:]}")
    with np.load(out) as kept:
        return dict(kept)


def log_densities(problem: Problem, points: Mapping[str, Any]) -> Any:
    """Return the NumPyro program's log joint density at points, site -> (S, *shape); (S,)."""
    with tempfile.TemporaryDirectory() as name:
        at = Path(name) / "points.npz"
        np.savez(at, **points)
        return in_own_process(problem, Path(name), "--density", str(at))["log_density"]


USER = ("--warmup", "500", "--draws", "1000")  # what a user would run
LONG = ("--warmup", "1000", "--draws", "10000", "--seed", "1")  # for a reference


def timed(problem: Problem, *, long: bool = False, again: bool = False) -> Timed:
    """Return pooled NUTS of a problem, from the cache unless it is missing there or `again` is true.

    Args:
        problem: the problem.
        long: run it as long as a reference needs.
        again: sample again, whatever is saved.

    Raises:
        NoNumpyro: it is not in the cache, and NumPyro is not installed.
        RuntimeError: the process failed.
    """
    file = cache() / f"pooled_{problem.name}{'_long' if long else ''}.npz"
    if again or not file.is_file():
        with tempfile.TemporaryDirectory() as name:
            found = in_own_process(problem, Path(name), *(LONG if long else USER))
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, **found)
        partial.replace(file)
    with np.load(file) as kept:
        return _timed(dict(kept))


def _timed(kept: Mapping[str, Any]) -> Timed:
    sites = [name.removesuffix(".mean") for name in kept if name.endswith(".mean")]
    return Timed(
        {s: ReferenceSummary(kept[f"{s}.mean"], kept[f"{s}.sd"], kept[f"{s}.mcse"]) for s in sites},
        float(kept["seconds"]),
        float(kept["r_hat"]),
        float(kept["least_effective"]),
        int(kept["diverging"]),
    )


def seconds(problem: Problem) -> float | None:
    """Return the seconds of pooled NUTS; None where it was not run and NumPyro is missing."""
    try:
        return timed(problem).seconds
    except NoNumpyro:
        return None


def truth_of(problem: Problem) -> Mapping[str, ReferenceSummary]:
    """Return the reference posterior: published, or else by NumPyro, or else (slowly) by Pyro.

    Of radon the scales are exact (`benchmarks.radon_exact`).
    """
    published = problem.shipped()
    if published is not None:
        return {**published, **scales()} if problem.name == "radon" else published
    try:
        return timed(problem, long=True).sites
    except NoNumpyro:
        return cached_nuts(problem)


def apart(
    one: Mapping[str, ReferenceSummary], other: Mapping[str, ReferenceSummary]
) -> tuple[float, float, float]:
    """Return the largest difference of means in sd, and the smallest and the largest ratio of sds."""
    sites = one.keys() & other.keys()
    mean = [np.max(np.abs(one[s].mean - other[s].mean) / other[s].sd) for s in sites]
    ratio = np.concatenate([np.reshape(one[s].sd / other[s].sd, -1) for s in sites])
    return float(max(mean)), float(ratio.min()), float(ratio.max())


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooled_nuts", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"problems, of {', '.join(ALL)}; default: all")
    parser.add_argument("--again", action="store_true", help="sample again, whatever is saved")
    parser.add_argument(
        "--pyro",
        action="store_true",
        help="compare the long run with NUTS by Pyro (slow), not the short one with the reference",
    )
    args = parser.parse_args(argv)
    if unknown := {*args.name} - {*ALL}:
        parser.error(f"there is no problem {', '.join(sorted(unknown))}: they are {', '.join(ALL)}")
    torch.set_default_dtype(torch.float64)
    headings = ("problem", "seconds", "R-hat", "effective", "diverging", "against")
    table = Table(*headings, "means, sd", "sd ratios", "worst z", title="pooled NUTS by NumPyro")
    for name in args.name or ALL:
        problem = ALL[name]
        try:
            found = timed(problem, again=args.again)
        except NoNumpyro as error:
            sys.exit(str(error))
        table.add_row(name, *cells(problem, found, args))
    Console(width=120).print(table)


def cells(problem: Problem, found: Timed, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the cells of a problem's row."""
    own = (f"{found.seconds:.1f}", f"{found.r_hat:.3f}", f"{found.effective:.0f}")
    if args.pyro:
        name, other = "Pyro", cached_nuts(problem)
        found = timed(problem, long=True)
    else:
        name, other = "reference", dict(truth_of(problem))
    mean, low, high = apart(found.sites, other)
    worst = max(float(np.max(z)) for z in agreement(found.sites, other).values())
    last = (name, f"{mean:.3f}", f"{low:.2f} to {high:.2f}", f"{worst:.1f}")
    return (*own, str(found.diverging), *last)


if __name__ == "__main__":
    main()
