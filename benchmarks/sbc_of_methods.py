"""Do a method's intervals cover: simulation-based calibration of a whole fit.

Run `python -m benchmarks.sbc_of_methods`.

8 clients of 1 to 8 binary rows, a_k ~ Normal(mu, tau), mu ~ Normal(0, 1.5), tau ~ HalfNormal(1):
few rows under an unknown spread, where `guides.structured` covers 73%. Each replication draws the
parameters from the prior and rows given them, fits the method, and ranks the parameters among its
draws. Replications are kept one by one in the user's cache folder, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from rich.console import Console

import hierfl
from benchmarks.reference import cache
from benchmarks.rounds import SELF_STOPPING, method_of
from benchmarks.rounds_table import Record
from benchmarks.simulated_models import generator
from hierfl import ClientBatch, ClientData
from hierfl.diagnostics.sbc import Sbc

COUNTS = tuple(range(1, 9))
REPLICATIONS, DRAWS = 500, 399
LEVEL, LOW, HIGH = 0.9, 0.87, 0.93  # the intervals, and the range that their coverage must lie in
SITES = ("mu", "tau", "a")


def tiny(batch: ClientBatch) -> None:
    """Model binary rows: y ~ Bernoulli(logit^-1(a_k)), a_k ~ Normal(mu, tau)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            logits = a + torch.zeros_like(batch.y)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def replication(seed: int) -> tuple[dict[str, Any], ClientData]:
    """Return parameters drawn from the prior, site -> value, and rows given them."""
    g = generator(seed)
    mu, tau = 1.5 * g.normal(), abs(g.normal())
    a = mu + tau * g.normal(size=len(COUNTS))
    client = np.repeat(np.arange(len(COUNTS)), COUNTS)
    y = (g.uniform(size=len(client)) < 1.0 / (1.0 + np.exp(-a[client]))).astype(float)
    return {"mu": mu, "tau": tau, "a": a}, ClientData.from_arrays(client, y=y)


def ranked(name: str, seed: int) -> Record:
    """Fit one replication, and return the number of draws below each true value, and how the fit went."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    truth, data = replication(seed)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of k-hat, which is kept
        method = method_of(name, tiny)
        try:
            fit = hierfl.fit(method, data, rounds=SELF_STOPPING[name], seed=seed, progress=False)
            drawn = fit.draws(DRAWS, seed=seed)
        except (RuntimeError, ValueError) as error:
            return {"seed": seed, "stops": str(error)}
    draws = {**drawn.shared, **drawn.own}
    ranks = {site: np.sum(draws[site].double().numpy() < truth[site], 0).tolist() for site in SITES}
    history = fit.history
    k_hat = float(history["k_hat"].iloc[-1]) if "k_hat" in history else None
    seconds = round(time.perf_counter() - began, 2)
    return {
        "seed": seed,
        "ranks": ranks,
        "k_hat": k_hat,
        "rounds": len(history),
        "seconds": seconds,
    }


def kept(file: Path) -> dict[int, Record]:
    """Return the replications that were run already, by seed."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {record["seed"]: record for record in map(json.loads, lines)}


def run(name: str, replications: int, *, workers: int = 1) -> list[Record]:
    """Run the replications that are missing, and return all of them.

    Args:
        name: of the method.
        replications: how many in all.
        workers: processes that share them.
    """
    return replicated(
        partial(ranked, name), replications, file=cache() / f"sbc_{name}.jsonl", workers=workers
    )


def replicated(
    one: Callable[[int], Record], replications: int, *, file: Path, workers: int
) -> list[Record]:
    """Run the replications that a file does not have, append them to it, and return all of them.

    Args:
        one: seed -> record, which has the seed; it can be pickled.
        replications: how many in all.
        file: of results.
        workers: processes that share them.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    done = kept(file)
    left = [seed for seed in range(replications) if seed not in done]
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        file.open("a") as out,
    ):
        for answer in as_completed(pool.submit(one, seed) for seed in left):
            record = answer.result()
            done[record["seed"]] = record
            out.write(json.dumps(record) + "\n")
            out.flush()
    return [done[seed] for seed in range(replications)]


def calibration(records: Sequence[Record]) -> Sbc:
    """Return the ranks of all replications that ended."""
    ended = [record["ranks"] for record in records if "ranks" in record]
    ranks = {site: np.array([one[site] for one in ended], dtype=np.int64) for site in SITES}
    return Sbc(
        shared={"mu": ranks["mu"], "tau": ranks["tau"]},
        own={"a": ranks["a"]},
        draws=DRAWS,
        clients=tuple(str(n) for n in COUNTS),
        rows=COUNTS,
        elbo=np.full(len(ended), np.nan),
    )


def coverage(records: Sequence[Record]) -> dict[str, float]:
    """Return how often the 90% intervals of each site cover."""
    found = calibration(records).coverage()[f"cover {LEVEL:.0%}"]
    return {site: float(found[site]) for site in SITES}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sbc_of_methods", description=__doc__
    )
    parser.add_argument("--method", default="fedlaplace", choices=[*SELF_STOPPING])
    parser.add_argument("--replications", type=int, default=REPLICATIONS)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args(argv)
    records = run(args.method, args.replications, workers=args.workers)
    found = calibration(records)
    console = Console(width=120)
    console.print(found.coverage().to_string())
    console.print(found.coverage_by_rows().to_string())
    print(json.dumps({"method": args.method, **summary(records)}))


def summary(records: Sequence[Record]) -> Record:
    """Return coverage, failures and seconds as JSON-compatible values."""
    ended = [record for record in records if "ranks" in record]
    return {
        "replications": len(records),
        "failed": len(records) - len(ended),
        "coverage": {site: round(value, 4) for site, value in coverage(records).items()},
        "k_hat_above_0.7": sum((record["k_hat"] or 0.0) >= 0.7 for record in ended),
        "most_rounds": max(record["rounds"] for record in ended),
        "median_seconds": float(np.median([record["seconds"] for record in ended])),
    }


if __name__ == "__main__":
    main()
