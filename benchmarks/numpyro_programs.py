"""The programs of all problems in NumPyro, each the same density as its Pyro program, centered or not.

A program takes the rows of all clients: `rows[field]` (n, ...), `rows["client"]` (n,), client
fields (N, ...), and the number of clients as `rows["clients"]`. `sampled` says which of its sites
NUTS samples non-centered, which leaves the posterior as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import LocScaleReparam

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Pooled:
    """A program, and how it is sampled and summarized.

    Args:
        program: of the rows of all clients.
        kept: the sites of the reference.
        apart: sites that are sampled non-centered.
        accept: target acceptance of NUTS.
    """

    program: Callable[[Rows], None]
    kept: tuple[str, ...]
    apart: tuple[str, ...] = ()
    accept: float = 0.9

    def sampled(self) -> Callable[[Rows], None]:
        """Return the program as it is sampled."""
        return numpyro.handlers.reparam(
            self.program, config={site: LocScaleReparam(0.0) for site in self.apart}
        )


def whole(name: str, fn: Any) -> Any:
    """Sample a site all of whose dimensions are one event."""
    return numpyro.sample(name, fn.to_event(len(fn.batch_shape)))


def of_clients(rows: Rows, loc: Any, scale: Any) -> Any:
    """Return Normal(loc, scale) of each client, (N, *shape of loc)."""
    shape = jnp.broadcast_shapes(jnp.shape(loc), jnp.shape(scale))
    return dist.Normal(loc, scale).expand((rows["clients"], *shape))


def radon(scale: Any) -> Callable[[Rows], None]:
    """Return radon's program with a prior of both scales."""

    def program(rows: Rows) -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", scale)
        slope = whole("slope", dist.Normal(jnp.zeros(3), 1.0))
        sigma = numpyro.sample("sigma", scale)
        a = whole("a", of_clients(rows, mu, tau))
        loc = a[rows["client"]] + rows["x"] @ slope
        numpyro.sample("y", dist.Normal(loc, sigma), obs=rows["y"])

    return program


def hospitals(rows: Rows) -> None:
    """Logistic regression with nine varying coefficients."""
    mu = whole("mu", dist.Normal(jnp.zeros(9), 1.0))
    log_tau = whole("log_tau", dist.Normal(-jnp.ones(9), 0.7))
    w = whole("w", of_clients(rows, mu, jnp.exp(log_tau)))
    logits = (rows["x"] * w[rows["client"]]).sum(-1)
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=rows["y"])


def schools(rows: Rows) -> None:
    """Eight schools with a half-Cauchy prior."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    theta = whole("theta", of_clients(rows, mu, tau))
    sigma = rows["sigma"].reshape(-1)  # of a school or of its one row
    numpyro.sample("y", dist.Normal(theta[rows["client"]], sigma), obs=rows["y"])


def ilea(rows: Rows) -> None:
    """Scores of pupils of London's schools."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    slope = whole("slope", dist.Normal(jnp.zeros(8), 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    a = whole("a", of_clients(rows, mu, tau))
    loc = a[rows["client"]] + rows["x"] @ slope
    numpyro.sample("y", dist.Normal(loc, sigma), obs=rows["y"])


def election(rows: Rows) -> None:
    """A poll, by state."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    vote = numpyro.sample("vote", dist.Normal(0.0, 1.0))
    area = whole("area", dist.Normal(jnp.zeros(4), 1.0))
    slope = whole("slope", dist.Normal(jnp.zeros(9), 1.0))
    loc = mu + vote * rows["v_prev"].reshape(-1) + rows["region"] @ area
    a = whole("a", dist.Normal(loc, tau))
    logits = a[rows["client"]] + rows["x"] @ slope
    numpyro.sample(
        "y", dist.Binomial(rows["n"].astype(int), logits=logits), obs=rows["y"].astype(int)
    )


def demo(rows: Rows) -> None:
    """The demo's hierarchy."""
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 2.5))
    beta = whole("beta", dist.Normal(jnp.zeros(27), 2.5))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    t = whole("t", dist.HalfNormal(0.5 * jnp.ones(27)))
    a = whole("intercept", of_clients(rows, alpha, s))
    b = whole("slope", of_clients(rows, beta, t))
    logits = a[rows["client"]] + (rows["x"] * b[rows["client"]]).sum(-1)
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=rows["y"])


def logistic(rows: Rows) -> None:
    """Logistic regression with varying coefficients, as many as columns."""
    columns = rows["x"].shape[1]
    mu = whole("mu", dist.Normal(jnp.zeros(columns), 2.5))
    tau = whole("tau", dist.HalfNormal(jnp.ones(columns)))
    w = whole("w", of_clients(rows, mu, tau))
    logits = (rows["x"] * w[rows["client"]]).sum(-1)
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=rows["y"])


def _intercepts(rows: Rows, prior: Any) -> Any:
    """Sample mu, tau, two slopes and the clients' intercepts.

    Return each row's linear predictor.
    """
    mu = numpyro.sample("mu", prior)
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    slope = whole("slope", dist.Normal(jnp.zeros(2), 1.0))
    a = whole("a", of_clients(rows, mu, tau))
    return a[rows["client"]] + rows["x"] @ slope


def poisson(rows: Rows) -> None:
    """Counts with exposures."""
    rate = rows["exposure"] * jnp.exp(_intercepts(rows, dist.Normal(0.0, 2.0)))
    numpyro.sample("y", dist.Poisson(rate), obs=rows["y"])


def negative_binomial(rows: Rows) -> None:
    """Overdispersed counts."""
    eta = _intercepts(rows, dist.Normal(0.0, 2.0))
    shape = numpyro.sample("shape", dist.Gamma(2.0, 0.5))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(eta), shape), obs=rows["y"])


def student_t(rows: Rows) -> None:
    """Errors with tails of unknown weight."""
    eta = _intercepts(rows, dist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    numpyro.sample("y", dist.StudentT(freedom, eta, sigma), obs=rows["y"])


def lkj(rows: Rows) -> None:
    """Correlated intercepts and slopes."""
    mu = whole("mu", dist.Normal(jnp.zeros(3), 1.0))
    tau = whole("tau", dist.HalfNormal(jnp.ones(3)))
    root = numpyro.sample("root", dist.LKJCholesky(3, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    own = dist.MultivariateNormal(mu, scale_tril=tau[:, None] * root)
    w = whole("w", own.expand((rows["clients"],)))
    matrix = root @ root.T
    numpyro.deterministic("correlation", jnp.stack([matrix[1, 0], matrix[2, 0], matrix[2, 1]]))
    loc = (rows["x"] * w[rows["client"]]).sum(-1)
    numpyro.sample("y", dist.Normal(loc, sigma), obs=rows["y"])


def horseshoe(rows: Rows) -> None:
    """A regularized horseshoe on the global coefficients."""
    columns = rows["x"].shape[1]
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(3.0 / (columns - 3.0) / math.sqrt(400.0)))
    own = whole("own", dist.HalfCauchy(jnp.ones(columns)))
    slab = numpyro.sample("slab", dist.InverseGamma(2.0, 8.0))
    scale = jnp.sqrt(slab / (slab + (spread * own) ** 2)) * own * spread
    beta = whole("beta", dist.Normal(0.0, scale))
    for name, value in (("spread", spread), ("own", own), ("slab", slab)):
        numpyro.deterministic(f"log_{name}", jnp.log(value))
    a = whole("a", of_clients(rows, mu, tau))
    loc = a[rows["client"]] + rows["x"] @ beta
    numpyro.sample("y", dist.Normal(loc, sigma), obs=rows["y"])


_RADON = ("mu", "tau", "slope", "sigma", "a")
_DEMO = Pooled(
    demo, ("alpha", "beta", "s", "t", "intercept", "slope"), apart=("intercept", "slope")
)
_SCHOOLS = Pooled(schools, ("mu", "tau", "theta"), apart=("theta",), accept=0.95)
_LOGISTIC = Pooled(logistic, ("mu", "tau", "w"), apart=("w",))
PROGRAMS = {
    "radon": Pooled(radon(dist.HalfNormal(1.0)), _RADON, apart=("a",)),
    "radon_uniform": Pooled(radon(dist.Uniform(0.0, 100.0)), _RADON, apart=("a",)),
    "hospitals": Pooled(hospitals, ("mu", "log_tau", "w"), apart=("w",)),
    "eight_schools": _SCHOOLS,
    "eight_schools_centered": _SCHOOLS,
    "ilea": Pooled(ilea, _RADON),
    "election88": Pooled(election, ("mu", "tau", "vote", "area", "slope", "a"), apart=("a",)),
    "demo": _DEMO,
    "demo_non_centered": _DEMO,
    "rare_labels": _LOGISTIC,
    "very_rare_labels": _LOGISTIC,
    "flipped": _LOGISTIC,
    "separable": _LOGISTIC,
    "poisson": Pooled(poisson, ("mu", "tau", "slope", "a")),
    "negative_binomial": Pooled(negative_binomial, ("mu", "tau", "slope", "shape", "a")),
    "student_t": Pooled(student_t, ("mu", "tau", "slope", "sigma", "freedom", "a")),
    "lkj": Pooled(lkj, ("mu", "tau", "correlation", "sigma", "w")),
    "horseshoe": Pooled(
        horseshoe,
        ("mu", "tau", "sigma", "log_spread", "log_own", "log_slab", "beta", "a"),
        apart=("beta",),
        accept=0.98,
    ),
}
