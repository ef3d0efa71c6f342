"""NUTS by NumPyro in a process of its own.

Run `python -m benchmarks.numpyro_sampler NAME ROWS OUT [options]`.

ROWS is a NumPy archive of the rows of all clients; OUT gets the mean, sd and Monte Carlo standard
error of each site, and the seconds. With `--density POINTS`, OUT gets the log joint density at each
point instead. `benchmarks.pooled_nuts` runs it; it imports neither torch nor hierfl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numpyro_sampler")
    parser.add_argument("name")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--density", help="archive of points, site -> (S, *shape)")
    args = parser.parse_args()
    import jax
    import numpyro

    jax.config.update("jax_enable_x64", True)
    numpyro.set_host_device_count(args.chains)
    with np.load(args.rows) as kept:
        rows: dict[str, Any] = dict(kept)
    rows["clients"] = int(rows["clients"])
    if args.density:
        with np.load(args.density) as points:
            np.savez(args.out, log_density=densities(args.name, rows, dict(points)))
        return
    np.savez(args.out, **sampled(args, rows))


def densities(name: str, rows: Mapping[str, Any], points: Mapping[str, Any]) -> np.ndarray:
    """Return the log joint density of the program at each point, (S,)."""
    from numpyro.infer.util import log_density

    from benchmarks.numpyro_programs import PROGRAMS

    count = len(next(iter(points.values())))
    at = [{site: value[s] for site, value in points.items()} for s in range(count)]
    program = PROGRAMS[name].program
    return np.array([float(log_density(program, (rows,), {}, one)[0]) for one in at])


def sampled(args: argparse.Namespace, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Run NUTS and summarize the sites of the reference."""
    import jax
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS, init_to_median

    from benchmarks.numpyro_programs import PROGRAMS

    pooled = PROGRAMS[args.name]
    began = time.perf_counter()
    kernel = NUTS(
        pooled.sampled(),
        target_accept_prob=pooled.accept,
        init_strategy=partial(init_to_median, num_samples=15),
    )
    run = MCMC(
        kernel,
        num_warmup=args.warmup,
        num_samples=args.draws,
        num_chains=args.chains,
        chain_method="parallel",
        progress_bar=False,
    )
    run.run(jax.random.PRNGKey(args.seed), rows, extra_fields=("diverging",))
    draws = {
        site: np.asarray(value)
        for site, value in run.get_samples(group_by_chain=True).items()
        if site in pooled.kept
    }
    seconds = time.perf_counter() - began
    out: dict[str, Any] = {"seconds": seconds, "chains": args.chains}
    out["diverging"] = int(np.asarray(run.get_extra_fields()["diverging"]).sum())
    out["r_hat"] = max(float(np.max(split_gelman_rubin(value))) for value in draws.values())
    least = np.inf
    for site, value in draws.items():
        effective = np.minimum(effective_sample_size(value), value.shape[0] * value.shape[1])
        sd = value.std((0, 1))
        least = min(least, float(np.min(effective)))
        out[f"{site}.mean"], out[f"{site}.sd"] = value.mean((0, 1)), sd
        out[f"{site}.mcse"] = sd / np.sqrt(effective)
    return {**out, "least_effective": least}


if __name__ == "__main__":
    main()
