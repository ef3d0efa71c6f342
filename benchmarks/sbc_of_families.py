"""Simulation-based calibration of every response family.

Run `python -m benchmarks.sbc_of_families --families weibull`.

8 clients of 12 rows and one covariate (`benchmarks.family_programs`). Each replication draws the
parameters from the priors and rows given them, fits two_stage, and ranks the parameters among its
draws. Replications are kept one by one in the user's cache folder, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import hierfl
from benchmarks.family_programs import NAMES, additions_of, drawn, program
from benchmarks.reference import cache
from benchmarks.rounds_table import Record
from benchmarks.sbc_of_methods import kept, replicated
from hierfl.diagnostics.sbc import Sbc
from hierfl.methods import two_stage

PAGE = Path(__file__).with_name("FAMILIES.md")
REPLICATIONS, LEAST, DRAWS = 200, 100, 399  # LEAST: that a line of the table needs
ABOUT = f"""# Simulation-based calibration of response families

`python -m benchmarks.sbc_of_families --write`: 8 clients of 12 rows, `y ~ x + (1 | client)`, parameters drawn from
their priors and rows drawn given them, fitted by `two_stage`; {DRAWS} draws. Over the global numbers of a family: the
smallest chi-square p-value of the ranks, how often central intervals of 50 and 90% cover, and whose ECDF leaves its
99% band. Data of ordinal families in which a level does not occur are drawn again, and those
of `ordered_beta` without zeros, without ones, or with three quarters of either.
"""
CHANCE = """
The {families} families of the table have {numbers} global numbers: if every posterior is exact, the smallest p-value of
all is {least:.3f} or less in {tables:.0f} of 100 such tables.
"""
HEAD = (
    *("family", "replications", "failed", "smallest p", "50% covers", "90% covers"),
    *("ECDF outside", "k-hat 0.7 or more", "most rounds"),
)


def ranked(name: str, seed: int) -> Record:
    """Fit one replication, and return the number of draws below each true value, and how the fit went."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    truth, data = drawn(name, seed)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of k-hat, which is kept
        try:
            method = two_stage(program(name, additions_of(name)))
            fit = hierfl.fit(method, data, seed=seed, progress=False)
            found = fit.draws(DRAWS, seed=seed)
            if "k_hat" not in fit.history:
                raise RuntimeError("two_stage ended before it weighted draws")
        except (RuntimeError, ValueError) as error:
            return {"family": name, "seed": seed, "stops": str(error)}
    draws = {**found.shared, **found.own}
    ranks = {site: (draws[site].double() < true).sum(0).tolist() for site, true in truth.items()}
    return {
        "family": name,
        "seed": seed,
        "ranks": ranks,
        "k_hat": float(fit.history["k_hat"].iloc[-1]),
        "rounds": len(fit.history),
        "seconds": round(time.perf_counter() - began, 2),
    }


def run(
    name: str, replications: int, *, workers: int = 1, file: Path | None = None
) -> list[Record]:
    """Run the replications of a family that are missing, and return all of them.

    Args:
        name: of the family.
        replications: how many in all.
        workers: processes that share them.
        file: of results, to be appended to. Default None: one in the user's cache folder.
    """
    file = _file(name) if file is None else file
    return replicated(partial(ranked, name), replications, file=file, workers=workers)


def _file(name: str) -> Path:
    return cache() / f"sbc_family_{name}.jsonl"


def calibration(records: Sequence[Record]) -> Sbc:
    """Return the ranks of all replications that ended."""
    ended = [record["ranks"] for record in records if "ranks" in record]
    ranks = {site: np.array([one[site] for one in ended], dtype=np.int64) for site in ended[0]}
    own = ranks.pop("a")
    return Sbc(
        shared=ranks,
        own={"a": own},
        draws=DRAWS,
        clients=tuple(str(k) for k in range(own.shape[1])),
        rows=(12,) * own.shape[1],
        elbo=np.full(len(ended), np.nan),
    )


def table(name: str, records: Sequence[Record]) -> pd.DataFrame:
    """Return, by global number, coverage, the chi-square p-value, and whether the ECDF leaves its 99% band."""
    found = calibration(records)
    scores = found.table()
    scores = scores[scores["client"].isna()].drop(columns=["client", "rows"])
    outside = []
    for site, number in zip(scores["site"], scores["number"], strict=True):
        band = found.ecdf(site, prob=0.99)
        column = band[number]
        outside.append(bool(((column < band["low"]) | (column > band["high"])).any()))
    return (
        scores.assign(outside=outside).assign(family=name).set_index(["family", "site", "number"])
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sbc_of_families", description=__doc__
    )
    parser.add_argument("--families", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--replications", type=int, default=REPLICATIONS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--write", action="store_true", help="write FAMILIES.md, of all families that are done"
    )
    args = parser.parse_args(argv)
    for name in args.families:
        records = run(name, args.replications, workers=args.workers)
        print(table(name, records).to_string())
        print(json.dumps({"family": name, **summary(records)}), flush=True)
    if args.write:
        known = {name: kept(_file(name)) for name in NAMES}
        PAGE.write_text(page({n: [*r.values()] for n, r in known.items() if len(r) >= LEAST}))


def page(done: Mapping[str, Sequence[Record]]) -> str:
    """Return the text of FAMILIES.md: a line for each family."""
    lines, p_values = [], list[float]()
    for name, records in done.items():
        scores, said = table(name, records), summary(records)
        p_values += scores["p"].tolist()
        covered = [
            f"{scores[f'cover {part}%'].min():.2f}-{scores[f'cover {part}%'].max():.2f}"
            for part in (50, 90)
        ]
        outside = ", ".join(scores[scores["outside"]].index.get_level_values("site")) or "none"
        cells = (
            *(name, said["replications"], said["failed"], f"{scores['p'].min():.3f}", *covered),
            *(outside, said["k_hat_above_0.7"], said["most_rounds"]),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    missing = ", ".join(name for name in NAMES if name not in done)
    rule = "|---|" + "---:|" * 5 + "---|" + "---:|" * 2
    least = min(p_values, default=1.0)
    chance = CHANCE.format(
        families=len(done),
        numbers=len(p_values),
        least=least,
        tables=100.0 * (1.0 - (1.0 - least) ** len(p_values)),
    )
    head = [ABOUT + chance, f"| {' | '.join(HEAD)} |", rule]
    left = ["", f"Not run yet: {missing}."] if missing else []
    return "\n".join([*head, *lines, *left, ""])


def summary(records: Sequence[Record]) -> Record:
    """Return failures, k-hat, rounds and seconds as JSON-compatible values."""
    ended = [record for record in records if "ranks" in record]
    return {
        "replications": len(records),
        "failed": len(records) - len(ended),
        "k_hat_above_0.7": sum(record["k_hat"] >= 0.7 for record in ended),
        "most_rounds": max(record["rounds"] for record in ended),
        "median_seconds": float(np.median([record["seconds"] for record in ended])),
    }


if __name__ == "__main__":
    main()
