"""Errors of federated posteriors against reference ones.

Run `python -m benchmarks.reference NAME`, or `--all`.

Prints a table, and as the last line one JSON object. Two of the references are read from
HIERFL_DATA. Where they are missing, pooled NUTS of the same program is run once instead, and its
result is saved in the user's cache folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.ops.stats import effective_sample_size
from rich.console import Console
from rich.table import Table

import hierfl
from benchmarks.reference_models import PROBLEMS, Bar, Draws, Problem, Way, all_sites
from hierfl.datasets import ReferenceSummary
from hierfl.diagnostics import corrected

Entries = dict[str, NDArray[np.float64]]  # site -> one number for each entry of the site


@dataclass(frozen=True)
class Errors:
    """Errors of a posterior against a reference, for each entry of each site.

    Args:
        mean: site -> |difference of means| / reference standard deviation.
        sd: site -> standard deviation / reference standard deviation.
    """

    mean: Entries
    sd: Entries

    def of(
        self, what: Literal["mean", "sd"], sites: Sequence[str] | None = None
    ) -> NDArray[np.float64]:
        """Return all entries of the given sites in one array; None: of all sites."""
        by_site = self.mean if what == "mean" else self.sd
        return np.concatenate(
            [
                values.reshape(-1)
                for site, values in by_site.items()
                if sites is None or site in sites
            ]
        )

    def worst_sd(self) -> tuple[str, float]:
        """Return the site and value of the sd ratio whose logarithm is farthest from 0."""
        at = {
            site: float(r.reshape(-1)[np.abs(np.log(r)).reshape(-1).argmax()])
            for site, r in self.sd.items()
        }
        site = max(at, key=lambda s: abs(np.log(at[s])))
        return site, at[site]

    def broken(self, bars: Sequence[Bar]) -> list[str]:
        """Describe each bar that does not hold, one line each."""
        out = []
        for bar in bars:
            values = self.of(bar.what, bar.sites)
            values = np.median(values, keepdims=True) if bar.median else values
            if values.min() < bar.low or values.max() > bar.high:
                which = f"{'median ' if bar.median else ''}{bar.what} of {', '.join(bar.sites or ('all sites',))}"
                out.append(
                    f"{which}: {values.min():.3f} to {values.max():.3f}, allowed {bar.low} to "
                    f"{bar.high}"
                )
        return out


def compare(draws: Draws, truth: Mapping[str, ReferenceSummary]) -> Errors:
    """Compare means and standard deviations of draws with a reference, for every site of the reference.

    Args:
        draws: site -> draws (S, *shape).
        truth: site -> mean and standard deviation, each (*shape).

    Returns:
        The errors, each (*shape).
    """
    mean, sd = {}, {}
    for site, summary in truth.items():
        values = draws[site].double().numpy().reshape(len(draws[site]), *np.shape(summary.mean))
        mean[site] = np.asarray(np.abs(values.mean(0) - summary.mean) / summary.sd)
        sd[site] = np.asarray(values.std(0) / summary.sd)
    return Errors(mean, sd)


@dataclass(frozen=True)
class Result:
    """Measured result of one way to fit a problem.

    Args:
        errors: errors against the reference.
        seconds: wall-clock time of the fit, in seconds.
        rounds: rounds of the fit.
        broken: a description of each bar that does not hold; None if the way has no bars.
    """

    errors: Errors
    seconds: float
    rounds: int
    broken: tuple[str, ...] | None

    def record(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values."""
        mean, sd, (site, worst) = (
            self.errors.of("mean"),
            self.errors.of("sd"),
            self.errors.worst_sd(),
        )
        return {
            "max_mean_error_sd": round(float(mean.max()), 4),
            "median_mean_error_sd": round(float(np.median(mean)), 4),
            "worst_sd_ratio": round(worst, 4),
            "worst_sd_site": site,
            "sd_ratio_min": round(float(sd.min()), 4),
            "sd_ratio_median": round(float(np.median(sd)), 4),
            "sd_ratio_max": round(float(sd.max()), 4),
            "seconds": round(self.seconds, 1),
            "rounds": self.rounds,
            "holds": None if self.broken is None else not self.broken,
            "broken": list(self.broken or ()),
        }


def measure(
    way: Way,
    problem: Problem,
    truth: Mapping[str, ReferenceSummary],
    *,
    seed: int = 0,
    correct: bool = False,
) -> Result:
    """Fit a problem one way and compare the posterior with the reference.

    Steps are not compiled: for programs this small, compiling takes longer (40 to 100 s) than
    running the rounds.

    Args:
        way: the way to fit it.
        problem: the problem.
        truth: the reference, site -> mean and standard deviation.
        seed: seed of the fit and the draws.
        correct: whether to correct the draws by Pareto-smoothed importance weights before they are
            compared.

    Returns:
        The errors, the time, and the bars that do not hold.
    """
    optimizer = hierfl.optimizers.Adam(way.lr)
    method = hierfl.methods.fedsvi(
        way.model,
        way.guide,
        optimizer=optimizer,
        local_optimizer=optimizer,
        draws=way.num_particles,
        average=way.average,
    )
    began = time.perf_counter()
    fit = hierfl.fit(
        method,
        problem.data(),
        rounds=way.rounds,
        seed=seed,
        cohort=way.cohort,
        settings=hierfl.Settings(compile=False),
    )
    seconds = time.perf_counter() - began
    drawn = (
        corrected(fit, way.draws, seed=seed).draws if correct else fit.draws(way.draws, seed=seed)
    )
    errors = compare(problem.effects(all_sites(drawn.shared, drawn.own)), truth)
    return Result(errors, seconds, way.rounds, tuple(errors.broken(way.bars)) if way.bars else None)


# ------------------------------------------------------------------------------------------------
# pooled NUTS
def pooled_nuts(
    problem: Problem, *, draws: int = 1000, warmup: int = 300, chains: int = 2, seed: int = 0
) -> dict[str, ReferenceSummary]:
    """Sample the problem's posterior by NUTS on all rows together.

    Args:
        problem: the problem.
        draws: draws of each chain.
        warmup: warm-up steps of each chain.
        chains: number of chains.
        seed: seed of the chains.

    Returns:
        Site -> mean, standard deviation and Monte Carlo standard error of the mean, each (*shape).
    """
    answer = hierfl.diagnostics.nuts(
        problem.sampled,
        problem.data(),
        draws=draws,
        warmup=warmup,
        chains=chains,
        seed=seed,
        dense=problem.dense,
    )
    worst = max(answer.r_hat.values())
    Console(stderr=True).print(
        f"pooled NUTS of {problem.name}: {chains} x {draws} draws, {answer.seconds:.0f} s, "
        f"largest R-hat {worst:.3f}"
    )
    out = {}
    for site, values in problem.effects(all_sites(answer.shared, answer.own)).items():
        apart = values.double().reshape(chains, draws, *values.shape[1:])
        size = effective_sample_size(apart, chain_dim=0, sample_dim=1).clamp(
            max=float(chains * draws)
        )
        sd = values.double().std(0)
        out[site] = ReferenceSummary(
            values.double().mean(0).numpy(), sd.numpy(), (sd / size.sqrt()).numpy()
        )
    return out


def agreement(
    one: Mapping[str, ReferenceSummary], other: Mapping[str, ReferenceSummary]
) -> Entries:
    """Return |difference of two means| / its Monte Carlo standard error, for each site that both have."""
    out = {}
    for site in one.keys() & other.keys():
        a, b = one[site], other[site]
        error = np.sqrt(
            np.square(0.0 if a.mcse is None else a.mcse)
            + np.square(0.0 if b.mcse is None else b.mcse)
        )
        out[site] = np.asarray(np.abs(a.mean - b.mean) / error)
    return out


def cache() -> Path:
    """Return the folder for results computed on this machine.

    It is the folder hierfl in $XDG_CACHE_HOME, in %LOCALAPPDATA% (Windows), or in ~/.cache.
    """
    folder = (
        os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    )
    return Path(folder) / "hierfl"


def cached_nuts(problem: Problem, *, again: bool = False) -> dict[str, ReferenceSummary]:
    """Return the result of `pooled_nuts`, from the cache unless it is missing there or `again` is true."""
    file = cache() / f"nuts_{problem.name}.npz"
    if again or not file.is_file():
        found = pooled_nuts(problem)
        file.parent.mkdir(parents=True, exist_ok=True)
        flat: dict[str, Any] = {
            f"{site}.{what}": np.asarray(getattr(s, what))
            for site, s in found.items()
            for what in ("mean", "sd", "mcse")
        }
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, **flat)
        partial.replace(file)
    with np.load(file, allow_pickle=False) as kept:
        sites = sorted({name.rsplit(".", 1)[0] for name in kept.files})
        return {
            site: ReferenceSummary(kept[f"{site}.mean"], kept[f"{site}.sd"], kept[f"{site}.mcse"])
            for site in sites
        }


def truth_of(problem: Problem) -> dict[str, ReferenceSummary]:
    """Return the reference posterior.

    Shipped, read from HIERFL_DATA, or else computed by pooled NUTS.
    """
    return problem.shipped() or cached_nuts(problem)


# ------------------------------------------------------------------------------------------------
# the command
def table(problem: Problem, results: Mapping[str, Result]) -> Table:
    """Return the table to print, one row for each guide."""
    out = Table(title=f"{problem.name}: against the reference posterior", title_justify="left")
    for heading in (
        "guide",
        "error of means, sd: max (site)",
        "median",
        "sd ratio: min",
        "median",
        "max",
        "rounds",
        "seconds",
        "holds",
    ):
        out.add_column(heading, justify="left" if heading == "guide" else "right")
    for name, result in results.items():
        mean, sd = result.errors.of("mean"), result.errors.of("sd")
        at = max(result.errors.mean, key=lambda s: result.errors.mean[s].max())
        low, high = (
            pick(result.errors.sd, key=lambda s: sign * result.errors.sd[s].max())
            for pick, sign in ((min, 1), (max, 1))
        )
        out.add_row(
            name,
            f"{mean.max():.3f} ({at})",
            f"{np.median(mean):.3f}",
            f"{sd.min():.2f} ({low})",
            f"{np.median(sd):.2f}",
            f"{sd.max():.2f} ({high})",
            str(result.rounds),
            f"{result.seconds:.1f}",
            "" if result.broken is None else "no" if result.broken else "yes",
        )
    return out


def run(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen ways of a problem, print the table, and return the results as JSON values."""
    console, truth = Console(width=140), truth_of(problem)
    chosen = {
        name: way for name, way in problem.ways.items() if not args.guide or name in args.guide
    }
    results = {}
    for name, way in chosen.items():
        changed = {"rounds": args.rounds, "cohort": args.cohort, "draws": args.draws}
        mine = replace(way, **{k: v for k, v in changed.items() if v is not None})
        results[name] = measure(
            mine, problem, truth, seed=args.seed, correct=args.correct is not None
        )
    console.print(table(problem, results))
    for name, result in results.items():
        for line in result.broken or ():
            console.print(f"{name}: {line}")
    record: dict[str, Any] = {"reference": problem.name, "seed": args.seed, "correct": args.correct}
    if args.nuts:
        scores = agreement(cached_nuts(problem, again=True), truth)
        record["nuts_mean_error_mcse"] = {
            site: round(float(z.max()), 2) for site, z in scores.items()
        }
        console.print(
            "pooled NUTS, error of means in Monte Carlo standard errors, worst entry of each site: "
            f"{record['nuts_mean_error_mcse']}"
        )
    return {**record, "guides": {name: result.record() for name, result in results.items()}}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*PROBLEMS], help="name of the reference")
    parser.add_argument("--all", action="store_true", help="measure every reference")
    parser.add_argument(
        "--guide", action="append", help="measure only this guide (may be repeated)"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of the guide's own")
    parser.add_argument(
        "--cohort", type=float, help="share of the clients that take part in a round"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draws", type=int, help="number of posterior draws, instead of the guide's own"
    )
    parser.add_argument(
        "--correct", choices=["psis"], help="correct the guide's draws by importance weights"
    )
    parser.add_argument(
        "--nuts",
        action="store_true",
        help="run pooled NUTS of the same program again, and compare it with the reference too",
    )
    args = parser.parse_args(argv)
    if args.all == bool(args.name):
        parser.error("give the name of one reference, or --all")
    torch.set_default_dtype(torch.float64)
    records = [
        run(problem, args) for name, problem in PROBLEMS.items() if args.all or name == args.name
    ]
    print(json.dumps({"references": records} if args.all else records[0]))


if __name__ == "__main__":
    main()
