"""What two_stage must reach, bar by bar.

Run `python -m benchmarks.must_hold [PART ...] [--method NAME] [--quick]`.

PART is one of accuracy, starts, clients and sbc; without it, all of them.

* accuracy: rounds, seconds and errors on each problem against its reference posterior.
* starts: 20 bad starts on radon and on the demo's hierarchy.
* clients: 10,000 clients of 5 to 50 rows (`benchmarks.many_clients`).
* sbc: coverage over 500 replications of 8 clients of 1 to 8 rows (`benchmarks.sbc_of_methods`).

Prints a line for each bar with what was asked and what was reached. Results are saved in the user's
cache folder; a bar that was measured is not measured again, but for `--again`. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import bad_starts, many_clients, sbc_of_methods
from benchmarks.pooled_nuts import truth_of
from benchmarks.reference import cache
from benchmarks.rounds import SELF_STOPPING, run
from benchmarks.rounds_models import ALL
from benchmarks.rounds_table import Record
from hierfl.core.importance_sampling import K_HAT

PARTS = ("accuracy", "starts", "clients", "sbc")
QUICK = ("poisson", "eight_schools_centered")


@dataclass(frozen=True)
class Asked:
    """What a method must reach on a problem.

    Args:
        mean: largest error of any mean, in reference sd.
        low: smallest ratio of sds.
        high: largest ratio of sds.
        rounds: most rounds.
        seconds: most seconds of clients and server.
        or_no: whether a k-hat of 0.7 or more will do instead.
    """

    mean: float = 0.1
    low: float = 0.0
    high: float = np.inf
    rounds: int | None = None
    seconds: float | None = None
    or_no: bool = False

    def words(self) -> str:
        """Describe it."""
        said = [f"means {self.mean} sd"]
        if self.low > 0.0:
            said.append(f"sds {self.low} to {self.high}")
        if self.rounds:
            said.append(f"{self.rounds} rounds")
        if self.seconds:
            said.append(f"{self.seconds:.0f} s")
        return ", ".join(said) + (f", or k-hat of {K_HAT} or more" if self.or_no else "")

    def held(self, found: Record) -> bool:
        """Return whether a record of `benchmarks.rounds` reaches it."""
        if "stops" in found:
            return False
        if (found["k_hat"] or 0.0) >= K_HAT:
            return self.or_no
        return bool(
            found["max_mean_error_sd"] <= self.mean
            and self.low <= found["sd_ratio_min"]
            and found["sd_ratio_max"] <= self.high
            and found["rounds_in_all"] <= (self.rounds or np.inf)
            and found["seconds"] <= (self.seconds or np.inf)
        )


_DEMO = Asked(0.12, 0.9, 1.1, rounds=4, seconds=60.0)
_OR_NO = Asked(or_no=True)
ASKED = {
    "demo": _DEMO,
    "demo_non_centered": _DEMO,
    "radon": Asked(0.05, 0.95, 1.05, rounds=5),
    "hospitals": Asked(rounds=4),
    "eight_schools": Asked(0.05, rounds=3),
    "eight_schools_centered": Asked(0.05, rounds=3),
    "ilea": Asked(rounds=5),
    "election88": Asked(rounds=5),
    **{n: _OR_NO for n in ("poisson", "negative_binomial", "student_t", "lkj", "horseshoe")},
    **{n: Asked() for n in ("rare_labels", "very_rare_labels", "flipped", "separable")},
}


@dataclass(frozen=True)
class Line:
    """One bar: what was asked, what was reached, and whether it holds."""

    bar: str
    asked: str
    reached: str
    holds: bool
    record: Record


# -----------------------------------------------------------------------------------------------------
# parts
def accuracy(name: str, problem: str) -> Line:
    """Measure a method on one problem."""
    asked, chosen = ASKED[problem], ALL[problem]
    found = run(chosen, (name,), seed=0)[name]  # saved for ROUNDS.md, too
    if "stops" in found:
        return Line(problem, asked.words(), f"failed: {found['stops']}", False, found)
    k_hat = "" if found["k_hat"] is None else f", k-hat {found['k_hat']}"
    reached = (
        f"means {found['max_mean_error_sd']} sd (global {found['max_global_error_sd']}, reference "
        f"itself {noise(problem)}), sds {found['sd_ratio_min']} to {found['sd_ratio_max']}, "
        f"{found['rounds_in_all']} rounds, {found['seconds']} s{k_hat}"
    )
    return Line(problem, asked.words(), reached, asked.held(found), found)


def noise(problem: str) -> str:
    """Return the reference's own largest Monte Carlo error of a mean, in sd."""
    errors = [np.max(s.mcse / s.sd) for s in truth_of(ALL[problem]).values() if s.mcse is not None]
    return f"{max(errors):.3f}" if errors else "unknown"


def starts(name: str, problem: str, count: int) -> Line:
    """Measure a method from bad starts."""
    records = [bad_starts.arrival(name, ALL[problem], number) for number in range(count)]
    arrived = sum(bad_starts.arrived(one) for one in records)
    worst = max((one["max_mean_error_sd"] for one in records if "stops" not in one), default=np.nan)
    most = max((one["rounds"] for one in records if "stops" not in one), default=0)
    reached = f"{arrived} of {count} arrive, worst mean {worst:.3f} sd, at most {most} rounds"
    asked = f"all {count} arrive: means {bad_starts.ARRIVED} sd"
    return Line(f"bad starts, {problem}", asked, reached, arrived == count, {"starts": records})


def clients(name: str, count: int) -> Line:
    """Measure a method on many clients."""
    found = many_clients.in_own_process(name, count)
    asked = (
        f"under {many_clients.MINUTES:.0f} minutes and {many_clients.GIGABYTES:.0f} GB, "
        "90% intervals cover"
    )
    bar = f"{count:,} clients"
    if "stops" in found:
        return Line(bar, asked, f"failed: {found['stops']}", False, found)
    minutes, covered = found["minutes"] + found["minutes_of_draws"], found["local_coverage"]
    reached = (
        f"{found['minutes']} minutes and {found['minutes_of_draws']} of draws, "
        f"{found['peak_gb']} GB, {found['rounds']} rounds, local intervals cover {covered:.1%}, "
        f"global ones {found['global_coverage']} (largest z {found['largest_global_z']})"
    )
    # four intervals of 90%: two misses or more have a chance of 5%
    missed = 4 - int(found["global_coverage"].split()[0])
    within = abs(covered - many_clients.LEVEL) < 0.02 + 2.0 * (0.09 / count) ** 0.5
    fast = minutes < many_clients.MINUTES and found["peak_gb"] < many_clients.GIGABYTES
    return Line(bar, asked, reached, bool(fast and within and missed <= 1), found)


def sbc(name: str, count: int, workers: int) -> Line:
    """Measure a method's coverage."""
    records = sbc_of_methods.run(name, count, workers=workers)
    found = sbc_of_methods.summary(records)
    low, high = sbc_of_methods.LOW, sbc_of_methods.HIGH
    covered = found["coverage"]
    reached = (
        ", ".join(f"{site} {value:.1%}" for site, value in covered.items())
        + f", {found['failed']} failed, k-hat above {K_HAT}: {found['k_hat_above_0.7']}, "
        f"{found['median_seconds']} s a fit"
    )
    holds = all(low <= value <= high for value in covered.values()) and not found["failed"]
    asked = f"90% intervals cover {low:.0%} to {high:.0%}"
    return Line(f"SBC, {count} replications", asked, reached, holds, found)


def bars(
    name: str, parts: Sequence[str], *, quick: bool, workers: int
) -> Iterator[tuple[str, Callable[[], Line]]]:
    """Yield the key and the measurement of each bar of some parts."""
    if "accuracy" in parts:
        for problem in QUICK if quick else ASKED:
            yield problem, partial(accuracy, name, problem)
    if "starts" in parts:
        for problem in ("radon",) if quick else ("radon", "demo"):
            count = 2 if quick else bad_starts.COUNT
            yield f"starts_{problem}_{count}", partial(starts, name, problem, count)
    if "clients" in parts:
        count = 200 if quick else many_clients.CLIENTS
        yield f"clients_{count}", partial(clients, name, count)
    if "sbc" in parts:
        count = 4 if quick else sbc_of_methods.REPLICATIONS
        yield f"sbc_{count}", partial(sbc, name, count, workers)


# ---------------------------------------------------------------------------------------------------
# results
def kept(file: Path) -> dict[str, Line]:
    """Return the lines that were measured before."""
    if not file.is_file():
        return {}
    return {key: Line(**line) for key, line in json.loads(file.read_text()).items()}


def save(file: Path, lines: Mapping[str, Line]) -> None:
    """Write the lines to the cache."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps({key: asdict(line) for key, line in lines.items()}))
    partial_file.replace(file)


def table(name: str, lines: Sequence[Line]) -> Table:
    """Return the table to print."""
    out = Table("bar", "asked", "reached", "holds", title=f"{name}: what must hold")
    for line in lines:
        out.add_row(line.bar, line.asked, line.reached, "yes" if line.holds else "NO")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.must_hold", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"parts, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--method", default="two_stage", choices=[*SELF_STOPPING])
    parser.add_argument(
        "--problem", action="append", help="measure accuracy on this problem alone (repeatable)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--again", action="store_true", help="measure again what was measured")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the SBC")
    args = parser.parse_args(argv)
    if unknown := {*args.part} - {*PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: they are {', '.join(PARTS)}")
    if unknown := {*(args.problem or ())} - {*ASKED}:
        parser.error(f"nothing is asked on {', '.join(sorted(unknown))}")
    torch.set_default_dtype(torch.float64)
    parts = ("accuracy",) if args.problem else tuple(args.part or PARTS)
    file, console = cache() / f"must_hold_{args.method}.json", Console(width=160)
    lines, shown = kept(file), []
    for key, measure in bars(args.method, parts, quick=args.quick, workers=args.workers):
        if args.problem and key not in args.problem:
            continue
        if args.again or key not in lines:
            lines[key] = measure()
            save(file, lines)
        shown.append(lines[key])
    console.print(table(args.method, shown))
    print(json.dumps({"method": args.method, "bars": {line.bar: line.holds for line in shown}}))


if __name__ == "__main__":
    main()
