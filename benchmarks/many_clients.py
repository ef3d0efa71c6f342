"""Ten thousand clients: `python -m benchmarks.many_clients [--clients N]`.

A Poisson hierarchy with exposures, 5 to 50 rows a client, simulated at known values. Measures the
minutes of the fit and of the draws, the peak memory of the process, and how often the 90%
intervals of the clients' effects and of the global sites hold the values that the counts were drawn
at. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import hierfl
from benchmarks.rounds import SELF_STOPPING, method_of
from benchmarks.rounds_table import Record, machine
from benchmarks.simulated_models import poisson, poisson_federation

CLIENTS, FEWEST, MOST = 10_000, 5, 50
DRAWS = 400
MINUTES, GIGABYTES, LEVEL = 10.0, 4.0, 0.9


def measure(name: str, clients: int, *, seed: int = 0) -> Record:
    """Fit a method to the simulated federation in this process.

    Args:
        name: of the method.
        clients: number of clients.
        seed: of the federation and of the fit.

    Returns:
        Minutes of the fit and of the draws, rounds, peak memory in GB (of this process since its
        start and of the largest one that it started), coverage, and each global number's distance
        from its value in posterior sd.
    """
    torch.set_default_dtype(torch.float64)
    data, truth = poisson_federation(clients, fewest=FEWEST, most=MOST, seed=seed)
    before = peak()
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = hierfl.fit(
            method_of(name, poisson), data, rounds=SELF_STOPPING[name], seed=seed, progress=False
        )
    fitted = time.perf_counter()
    drawn = fit.draws(DRAWS, seed=seed)
    draws = {**drawn.shared, **drawn.own}
    return {
        "method": name,
        "clients": clients,
        "rows": data.num_rows,
        "rounds": len(fit.history),
        "minutes": round((fitted - began) / 60.0, 2),
        "minutes_of_draws": round((time.perf_counter() - fitted) / 60.0, 2),
        "peak_gb": round(peak(), 2),
        "peak_gb_before": round(before, 2),
        "local_coverage": round(float(inside(draws["a"], truth["a"]).mean()), 4),
        **of_globals(draws, truth),
        "warnings": sorted({str(one.message) for one in caught}),
        "machine": machine(),
    }


def peak() -> float:
    """Return the peak memory of this process, or of the largest one that it started, in GB."""
    # Linux counts KiB, macOS bytes
    unit = 1024.0**3 if sys.platform == "darwin" else 1024.0**2
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(one).ru_maxrss for one in who) / unit


def inside(draws: torch.Tensor, truth: Any) -> Any:
    """Return whether each number's central 90% interval holds its value, of the numbers' shape."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(draws.double().numpy(), [tail, 1.0 - tail], axis=0)
    return (low <= truth) & (truth <= high)


def of_globals(draws: Mapping[str, torch.Tensor], truth: Mapping[str, Any]) -> Record:
    """Return coverage of the global numbers, and their largest distance from their values."""
    sites = ("mu", "tau", "slope")
    held = np.concatenate([np.reshape(inside(draws[s], truth[s]), -1) for s in sites])
    z = [
        np.abs(draws[s].double().numpy().mean(0) - truth[s]) / draws[s].double().numpy().std(0)
        for s in sites
    ]
    return {
        "global_coverage": f"{int(held.sum())} of {len(held)}",
        "largest_global_z": round(float(max(np.max(one) for one in z)), 2),
    }


def in_own_process(name: str, clients: int) -> Record:
    """Measure in a new process, whose peak memory is that of this fit alone."""
    command = [sys.executable, "-m", "benchmarks.many_clients", "--method", name]
    done = subprocess.run(
        [*command, "--clients", str(clients)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"stops": done.stderr[-2000:]}
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_clients", description=__doc__)
    parser.add_argument("--method", default="fedlaplace", choices=[*SELF_STOPPING])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    args = parser.parse_args(argv)
    print(json.dumps(measure(args.method, args.clients)))


if __name__ == "__main__":
    main()
