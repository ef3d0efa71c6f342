"""Small hierarchies of random data, with posteriors known in closed form or by quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from scipy.special import gammaln
from scipy.stats import halfnorm

from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.program.sites import Model

Array = NDArray[np.float64]
Whole = NDArray[np.int64]
U = np.linspace(-7.0, 7.0, 211)  # an effect about its mean, in standard deviations of its prior
LOCS, SPREADS = 41, 61  # points of the grids of mu and of log tau
NAMES = ("gaussian", "spread", "poisson", "logistic", "global")


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its data, and the moments of its posterior.

    Args:
        name: one of `NAMES`.
        model: the program.
        data: of 2 to 5 clients of 1 to 12 rows.
        moments: site -> means and standard deviations, flat: a local site's by client.
    """

    name: str
    model: Model
    data: ClientData
    moments: dict[str, tuple[Array, Array]]


def problem(name: str, seed: int) -> Problem:
    """Draw the data of a problem and find its posterior."""
    g = np.random.default_rng([seed, NAMES.index(name)])
    clients = int(g.integers(2, 6))
    counts = g.integers(1, 13, clients)
    owner = np.repeat(np.arange(clients), counts).astype(np.int64)
    mu, tau = g.normal(), abs(g.normal())
    b = mu + tau * g.normal(size=clients)
    if name == "global":
        return _global(g, owner)
    if name == "gaussian":
        y, model = b[owner] + g.normal(size=len(owner)), _hierarchy(_normal, 0.3 + tau)
        return Problem(name, model, _data(owner, y), _closed_form(y, owner, clients, 0.3 + tau))
    if name == "spread":
        y, model = b[owner] + g.normal(size=len(owner)), _hierarchy(_normal, None)
    elif name == "poisson":
        model = _hierarchy(_poisson, None)
        y = g.poisson(np.exp(np.clip(b, -5.0, 4.0))[owner]).astype(float)
    else:
        y = (g.random(len(owner)) < 1.0 / (1.0 + np.exp(-b[owner]))).astype(float)
        model = _hierarchy(_logistic, None)
    return Problem(name, model, _data(owner, y), _by_quadrature(name, y, owner, clients))


def _data(owner: Whole, y: Array, **fields: Array) -> ClientData:
    given: dict[str, Any] = {n: torch.as_tensor(v) for n, v in {"y": y, **fields}.items()}
    return ClientData.from_arrays(torch.as_tensor(owner), **given)


# ------------------------------------------------------------------------------------------------
# models
def _normal(b: torch.Tensor) -> dist.TorchDistribution:
    return dist.Normal(b, 1.0)


def _poisson(b: torch.Tensor) -> dist.TorchDistribution:
    return dist.Poisson(b.exp())


def _logistic(b: torch.Tensor) -> dist.TorchDistribution:
    return dist.Bernoulli(logits=b)


def _hierarchy(likelihood: Callable[..., dist.TorchDistribution], spread: float | None) -> Model:
    """Return mu ~ Normal(0, 2), tau ~ HalfNormal(1) or known, b_k ~ Normal(mu, tau), and rows given b_k."""

    def hierarchy(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0)) if spread is None else spread
        with batch.clients():
            b = pyro.sample("b", dist.Normal(mu, tau))
            with batch.data():
                pyro.sample("y", likelihood(b), obs=batch.y)

    return hierarchy


def _two_coefficients(batch: ClientBatch) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    c = pyro.sample("c", dist.Normal(0.0, 2.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Bernoulli(logits=a + c * batch.x), obs=batch.y)


# ------------------------------------------------------------------------------------------------
# posteriors
def _closed_form(
    y: Array, owner: Whole, clients: int, tau: float
) -> dict[str, tuple[Array, Array]]:
    """Return the moments of the Gaussian hierarchy, by its joint precision of (mu, b_1, ..., b_N)."""
    counts = np.bincount(owner, minlength=clients)
    precision = np.diag(np.r_[0.25 + clients / tau**2, counts + 1.0 / tau**2])
    precision[0, 1:] = precision[1:, 0] = -1.0 / tau**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.r_[0.0, np.bincount(owner, y, clients)]
    sd = np.sqrt(covariance.diagonal())
    return {"mu": (mean[:1], sd[:1]), "b": (mean[1:], sd[1:])}


def _by_quadrature(
    name: str, y: Array, owner: Whole, clients: int
) -> dict[str, tuple[Array, Array]]:
    """Return the moments of a hierarchy with unknown tau, on a grid of (mu, log tau) that is refined twice."""
    locs, logs = np.linspace(-8.0, 8.0, LOCS), np.linspace(np.log(1e-3), np.log(6.0), SPREADS)
    for _ in range(3):
        m, tau = (v.ravel() for v in np.meshgrid(locs, np.exp(logs), indexing="ij"))
        log_p = -0.125 * m**2 + halfnorm.logpdf(tau) + np.log(tau)
        first, second = np.zeros((clients, len(m))), np.zeros((clients, len(m)))
        effect = m[:, None] + tau[:, None] * U
        for k in range(clients):
            log_w = _log_likelihood(name, y[owner == k], effect) - 0.5 * U**2
            top = log_w.max(1, keepdims=True)
            w = np.exp(log_w - top)
            total = w.sum(1)
            log_p = log_p + np.log(total) + top[:, 0]
            first[k], second[k] = ((w * effect**p).sum(1) / total for p in (1, 2))
        share = np.exp(log_p - log_p.max())
        share /= share.sum()
        mean, sd = _weighted(share, m)
        at, far = _weighted(share, np.log(tau))
        locs = np.linspace(mean - 8.0 * sd, mean + 8.0 * sd, LOCS)
        logs = np.linspace(at - 8.0 * far, min(at + 8.0 * far, np.log(6.0)), SPREADS)
    b = first @ share
    return {
        "mu": _arrays(_weighted(share, m)),
        "tau": _arrays(_weighted(share, tau)),
        "b": (b, np.sqrt(second @ share - b**2)),
    }


def _log_likelihood(name: str, y: Array, b: Array) -> Array:
    if name == "spread":
        found = -0.5 * len(y) * (b - y.mean()) ** 2
    elif name == "poisson":
        found = y.sum() * b - len(y) * np.exp(b) - gammaln(y + 1.0).sum()
    else:
        found = y.sum() * b - len(y) * np.logaddexp(0.0, b)
    return np.asarray(found)


def _global(g: np.random.Generator, owner: Whole) -> Problem:
    """Logistic regression with two global coefficients and no local site, on a grid that is refined twice."""
    x = g.normal(size=len(owner))
    y = (g.random(len(owner)) < 1.0 / (1.0 + np.exp(-g.normal() - g.normal() * x))).astype(float)
    first, second = np.linspace(-12.0, 12.0, 121), np.linspace(-12.0, 12.0, 121)
    for _ in range(3):
        a, c = (v.ravel() for v in np.meshgrid(first, second, indexing="ij"))
        eta = a[:, None] + c[:, None] * x
        log_p = -0.125 * (a**2 + c**2) + (y * eta - np.logaddexp(0.0, eta)).sum(1)
        share = np.exp(log_p - log_p.max())
        share /= share.sum()
        found = [_weighted(share, v) for v in (a, c)]
        first, second = (np.linspace(m - 7.0 * s, m + 7.0 * s, 121) for m, s in found)
    moments = {"a": _arrays(found[0]), "c": _arrays(found[1])}
    return Problem("global", _two_coefficients, _data(owner, y, x=x), moments)


def _weighted(share: Array, values: Array) -> tuple[float, float]:
    mean = float(share @ values)
    return mean, float(np.sqrt(share @ (values - mean) ** 2))


def _arrays(moments: tuple[float, float]) -> tuple[Array, Array]:
    return np.array([moments[0]]), np.array([moments[1]])
