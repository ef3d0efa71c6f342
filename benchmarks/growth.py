"""Cost and accuracy by the number of clients: `python -m benchmarks.growth [--clients 10 100 ...]`.

Five yes/no rows a client about its own intercept. The posterior of mean and spread is known
exactly, on a grid: clients differ only by how many of their rows are yes. Each number of clients
has a process of its own, one thread; seconds are CPU seconds, imports apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.special import expit, logsumexp

import hierfl

CLIENTS, ROWS = (10, 100, 1_000, 10_000, 100_000), 5
NODES, GRID, WIDE = 60, 81, 6.0  # of the exact posterior: Gauss-Hermite nodes, points, sds


def model(batch: hierfl.ClientBatch) -> None:
    """A logistic regression of intercepts alone."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=a), obs=batch.y)


def exact(yes: np.ndarray, about: tuple[float, ...]) -> np.ndarray:
    """Return mean and sd of mu and of tau, (2, 2), given how many rows are `yes` at each client.

    `about` are a mean and an sd of both, from which the grid is made.
    """
    counts = np.bincount(yes, minlength=ROWS + 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    at = np.linspace(-WIDE, WIDE, GRID)
    mu, tau = about[0] + about[1] * at, np.maximum(about[2] + about[3] * at, 1e-3)
    mu, tau = mu[:, None], np.unique(tau)[None]
    p = expit(mu[..., None] + tau[..., None] * nodes)[..., None]
    k = np.arange(ROWS + 1)
    each = np.log((p**k * (1.0 - p) ** (ROWS - k) * weights[:, None]).sum(-2))
    log = each @ counts - 0.5 * (mu / 1.5) ** 2 - 0.5 * tau**2
    share = np.exp(log - logsumexp(log))

    def moments(value: np.ndarray) -> tuple[float, float]:
        mean = (share * value).sum()
        return mean, float(np.sqrt((share * (value - mean) ** 2).sum()))

    return np.array([moments(mu), moments(tau)])


def measured(clients: int) -> dict[str, float]:
    """Fit one federation in this process."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    own = 0.3 + rng.standard_normal(clients)
    y = (rng.random((clients, ROWS)) < expit(own)[:, None]).astype(np.float32)
    client = torch.arange(clients).repeat_interleave(ROWS)
    names = [f"c{i}" for i in range(clients)]
    data = hierfl.ClientData.from_arrays(client, names=names, y=torch.tensor(y.ravel()))
    begin = time.process_time()
    fit = hierfl.fit(model, data, seed=0)
    fitted = time.process_time()
    drawn = fit.draws(1000).shared
    ended = time.process_time()
    found = [drawn[name].double() for name in ("mu", "tau")]
    about = tuple(f(v).item() for v in found for f in (torch.mean, torch.std))
    truth = exact(y.sum(1).astype(int), about)
    off = [(v.mean().item() - t[0]) / t[1] for v, t in zip(found, truth, strict=True)]
    return {
        "clients": clients,
        "rounds": len(fit.history),
        "fit": fitted - begin,
        "draws": ended - fitted,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "mu off": off[0],
        "tau off": off[1],
        "tau": found[1].mean().item(),
        "exact tau": truth[1][0],
        "sds": found[1].std().item() / truth[1][1],
        "k_hat": float(fit.history["k_hat"].iloc[-1]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, a row for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measured(args.one)))
        return
    print("| clients | rounds | fit, CPU s | 1,000 draws, CPU s | MB | mean of mu off, sd | of tau "
          "| tau | exactly | its sd, ratio | k-hat |")  # fmt: skip
    print("|" + "---:|" * 11)
    for clients in args.clients:
        command = [sys.executable, "-m", "benchmarks.growth", "--one", str(clients)]
        ran = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        v = json.loads(ran.stdout.splitlines()[-1])
        print(
            f"| {v['clients']:,} | {v['rounds']} | {v['fit']:.1f} | {v['draws']:.1f} | {v['MB']:.0f} "
            f"| {v['mu off']:.3f} | {v['tau off']:.3f} | {v['tau']:.4f} | {v['exact tau']:.4f} "
            f"| {v['sds']:.2f} | {v['k_hat']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
