"""`examples/recipes/horseshoe.py` in NumPyro, whose NUTS ends in minutes where Pyro's takes hours.

Usage: `PYTHON horseshoe_numpyro.py ROWS.npz DRAWS.npz` with a Python that has NumPyro and needs no
hierfl. ROWS has x (rows, 27), y (rows,) and client (rows,); DRAWS gets every latent site, (chains,
draws, ...), as the recipe names it.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

EXPECTED, COLUMNS, PATIENTS = 5, 27, 920
TAU = EXPECTED / (COLUMNS - EXPECTED) * 2.0 / PATIENTS**0.5
WARMUP, DRAWS, CHAINS = 1000, 2500, 4
ACCEPT = 0.99  # at 0.95 there are divergences in the horseshoe's funnels


def model(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> None:
    """Sample the recipe's sites, slopes and shifts non-centered."""
    # A half-Cauchy as Normal over the root of a Gamma (Piironen and Vehtari 2017, appendix C): its
    # tail is no obstacle.
    tau = TAU * half_cauchy("tau", ())
    own = half_cauchy("own", (COLUMNS,))
    c2 = numpyro.sample("c2", dist.InverseGamma(2.0, 8.0))
    softened = own * jnp.sqrt(c2 / (c2 + tau**2 * own**2))
    free = numpyro.sample("free_slope", dist.Normal(jnp.zeros(COLUMNS), 1.0))
    slope = tau * softened * free
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    apart = numpyro.sample("free_shift", dist.Normal(jnp.zeros(4), 1.0))
    shift = mu + spread * apart
    for name, value in (("tau", tau), ("own", own), ("slope", slope), ("shift", shift[:, None])):
        numpyro.deterministic(name, value)
    numpyro.sample("y", dist.BernoulliLogits(shift[client] + x @ slope), obs=y)


def half_cauchy(name: str, shape: tuple[int, ...]) -> jax.Array:
    """Return |z| sqrt(v), z ~ Normal(0, 1) and v ~ InverseGamma(1/2, 1/2)."""
    z = numpyro.sample(f"z_{name}", dist.HalfNormal(jnp.ones(shape)))
    v = numpyro.sample(f"v_{name}", dist.InverseGamma(0.5 * jnp.ones(shape), 0.5))
    return z * jnp.sqrt(v)


def main(rows: str, draws: str) -> None:
    """Sample, and write the draws."""
    jax.config.update("jax_enable_x64", True)
    data = np.load(rows)
    kernel = NUTS(model, target_accept_prob=ACCEPT)
    run = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    run.run(jax.random.PRNGKey(0), data["x"], data["y"], data["client"])
    drawn = run.get_samples(group_by_chain=True)
    names = ("tau", "own", "c2", "slope", "mu", "spread", "shift")
    arrays: dict[str, Any] = {name: np.asarray(drawn[name]) for name in names}
    np.savez(draws, **arrays)
    print(f"{int(run.get_extra_fields()['diverging'].sum())} divergences")


if __name__ == "__main__":
    main(*sys.argv[1:])
