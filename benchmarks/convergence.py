"""Is `hierfl.diagnostics.convergence` right? `python -m benchmarks.convergence [--fits 200] [--seed 2] [--write]`.

Fits random models to small random data of known posterior by fedsvi with several guides, for random
numbers of rounds and step sizes, many of them too few or too small, and by fedlaplace, bfi and pvi.
It asks `convergence` of each, and compares each fit's means and standard deviations with the
posterior's.

Each fit is appended to a file of --out as it ends, and a run that was stopped goes on there;
`--part 0/2` and `--part 1/2` can run beside each other. Prints a table; `--write` also writes it to
benchmarks/CONVERGENCE.md. The limits of `convergence` were set by 44 fits of seeds 0 and 1, of an
earlier form of the weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import hierfl
from benchmarks.convergence_problems import NAMES, Problem, problem
from hierfl import guides, methods
from hierfl.diagnostics import Convergence, convergence
from hierfl.diagnostics.weighted_moments import Moments
from hierfl.method import Method
from hierfl.runs.result import Fit

GUIDES = {
    "mean_field": guides.mean_field,
    "low_rank": guides.low_rank(rank=2),
    "structured": guides.structured,
    "conditional": guides.conditional,
}
WAYS = (
    *GUIDES,
    *GUIDES,
    "fedlaplace",
    "bfi",
    "pvi",
)  # a guide is as likely again as another method
DRAWS = 2000  # of the fit, for its own moments
OFF = 0.2  # of a standard deviation, or of its ratio to the posterior's


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "convergence")
    parser.add_argument("--part", default="0/1", help="i/n: fit only the numbers i, i + n, ...")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)
    kept = asked.out / f"seed_{asked.seed}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = {record["number"] for record in _read(kept)}
    part, parts = (int(v) for v in asked.part.split("/"))
    with kept.open("a", buffering=1 << 20) as file:  # one write a line: parts share the file
        for number in range(part, asked.fits, parts):
            if number not in done:
                file.write(json.dumps(one(number, asked.seed)) + "\n")
                file.flush()
    records = [record for record in _read(kept) if record["number"] < asked.fits]
    text = page(pd.DataFrame([_answered(record) for record in records]), asked.seed)
    print(text)
    if asked.write:
        (Path(__file__).parent / "CONVERGENCE.md").write_text(text)


def _read(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def one(number: int, seed: int) -> dict[str, Any]:
    """Fit and judge one random combination: a record."""
    g = np.random.default_rng([seed, number])
    name, way = str(g.choice(NAMES)), str(g.choice(WAYS))
    of = problem(name, seed * 100_000 + number)
    rounds = int(np.exp(g.uniform(np.log(30), np.log(300))))
    rate, particles = float(g.choice([0.03, 0.1, 0.2])), int(g.choice([1, 4]))
    record: dict[str, Any] = {"number": number, "problem": name, "way": way, "rounds": rounds}
    method = _method(way, of, rate, particles)
    rounds = {"fedlaplace": 60, "bfi": 1, "pvi": 1 + rounds // 10}.get(way, rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if way in GUIDES:  # the quicker
                fit = hierfl.fit_pooled(method, of.data, rounds=rounds, seed=number)
            else:
                eager = hierfl.Settings(compile=False)
                fit = hierfl.fit(
                    method, of.data, rounds=rounds, seed=number, settings=eager, progress=False
                )
        except (RuntimeError, ValueError) as error:
            return {**record, "answer": "no fit", "why": str(error)[:200]}
        began = time.perf_counter()
        found = convergence(fit, seed=seed)
        seconds = time.perf_counter() - began
    return {
        **record,
        "rounds": fit.progress.round,
        "rate": rate,
        **_truth(fit, of),
        **_asked(found),
        "seconds": seconds,
    }


def _method(way: str, of: Problem, rate: float, particles: int) -> Method:
    if way == "pvi":
        return methods.pvi(of.model)
    if way == "fedlaplace":
        return methods.fedlaplace(of.model)
    if way == "bfi":
        return methods.bfi(of.model)
    adam = hierfl.optimizers.Adam(rate)
    return methods.fedsvi(
        of.model, GUIDES[way], optimizer=adam, local_optimizer=adam, draws=particles
    )


def _truth(fit: Fit, of: Problem) -> dict[str, Any]:
    """Return how far the fit's moments are from the posterior's: the worst of each."""
    draws, shifts, ratios = fit.draws(DRAWS, seed=1), [], []
    for site, (mean, sd) in of.moments.items():
        values = {**draws.shared, **draws.own}[site].reshape(DRAWS, -1).numpy()
        shifts.append((values.mean(0) - mean) / sd)
        ratios.append(values.std(0) / sd)
    ratio, shift = np.concatenate(ratios), np.abs(np.concatenate(shifts))
    return {
        "narrowest": float(ratio.min()),
        "widest": float(ratio.max()),
        "shift": float(shift.max()),
    }


def _asked(found: Convergence) -> dict[str, Any]:
    """Return what `convergence` said, with the numbers behind it."""
    return {
        "answer": found.answer,
        "verdict": found.verdict,
        "k_hat": found.k_hat,
        "effective": found.effective,
        "numbers": found.scalars.drop(columns=["client", "index"], errors="ignore").to_dict("list"),
    }


def _answered(record: dict[str, Any]) -> dict[str, Any]:
    """Take the answer anew from the stored moments, so that limits can be tuned without fitting again."""
    if not record.get("numbers"):
        return record
    numbers = pd.DataFrame(record["numbers"]).assign(client="", index="")
    moments = Moments(numbers, record["k_hat"], record["effective"], 0)
    return {**record, "answer": moments.answer()}


# ------------------------------------------------------------------------------------------------
# the table
def page(records: pd.DataFrame, seed: int) -> str:
    """Return the page of a run."""
    done = records[records["answer"] != "no fit"].copy()
    good = done["answer"] == "good"
    done["sd off"] = (done["narrowest"] < 1.0 - OFF) | (done["widest"] > 1.0 + OFF)
    done["off"] = done["sd off"] | (done["shift"] > OFF)
    right = ~done["off"]
    lines = [
        "# Is `convergence` right?",
        "",
        f"`python -m benchmarks.convergence --fits {len(records)} --seed {seed}`; "
        "limits were set by 44 fits of seeds 0 and 1.",
        f"{len(records)} random fits of small hierarchies whose posterior is known; "
        f"{len(records) - len(done)} had no answer to judge (the method raised).",
        "A fit is off if the sd of any number is off by more than 20%, or its mean by more than "
        "0.2 sd.",
        "",
        f"* Called good: {good.sum()}. Of these, an sd is off by more than 20% in "
        f"{_part(done['sd off'] & good, good)}, an sd or a mean in "
        f"{_part(done['off'] & good, good)}.",
        f"* Fits within 20%: {right.sum()}. Of these, {_part(right & ~good, right)} are not "
        "called good.",
        f"* Seconds to judge a fit: median {done['seconds'].median():.1f}, largest "
        f"{done['seconds'].max():.1f}.",
        "",
        "| way | fits | good and right | good, but off | refused, off | refused, but right | "
        "worst sd ratio of those called good | worst mean, sd |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way in dict.fromkeys(WAYS):
        lines.append(_row(way, done[done["way"] == way]))
    lines.append(_row("all", done))
    lines += [
        "",
        "| problem " + lines[-len(dict.fromkeys(WAYS)) - 3][6:],
        lines[-len(dict.fromkeys(WAYS)) - 2],
    ]
    for name in NAMES:
        lines.append(_row(name, done[done["problem"] == name]))
    return "\n".join(lines) + "\n"


def _part(some: pd.Series, of: pd.Series) -> str:
    return f"{some.sum()} ({some.sum() / max(of.sum(), 1):.1%})"


def _row(name: str, found: pd.DataFrame) -> str:
    good, off = found["answer"] == "good", found["off"]
    counts = [(good & ~off), (good & off), (~good & off), (~good & ~off)]
    cells = [str(int(c.sum())) for c in counts]
    passed = found[good]
    if len(passed):
        worst = max(passed["widest"].max(), 1.0 / passed["narrowest"].min())
        edge = (
            f"{passed['narrowest'].min():.2f}" if worst > passed["widest"].max() else f"{worst:.2f}"
        )
        cells += [edge, f"{passed['shift'].max():.2f}"]
    else:
        cells += ["", ""]
    return f"| {name} | {len(found)} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
