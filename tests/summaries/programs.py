"""Tiny programs of every kind that two_stage takes or refuses, their rows, and posteriors by grid."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl import ClientBatch, ClientData, Program, full_batch
from hierfl.core.gaussians import Factor
from hierfl.program.read import read_model
from hierfl.summaries.factor import factor_of
from hierfl.summaries.packed_rows import PackedRows, packed
from hierfl.summaries.reading import Line, nodes_of
from hierfl.summaries.units import UnitScore


def people(counts: Sequence[int] = (5, 3, 7, 1), *, seed: int = 0) -> ClientData:
    """Clients whose levels differ.

    Fields: x (2,), time, part (codes 0 to 2), y, ill (0/1), visits (counts). Client fields: height,
    ward (0/1).
    """
    g = torch.Generator().manual_seed(seed)
    n, clients = sum(counts), len(counts)
    which = torch.repeat_interleave(torch.arange(clients), torch.tensor(counts))
    level = 0.3 + torch.randn(clients, generator=g)
    x = torch.randn(n, 2, generator=g)
    return ClientData.from_arrays(
        which,
        names=[f"c{k}" for k in range(clients)],
        client_fields={
            "height": 0.5 * torch.randn(clients, generator=g),
            "ward": torch.arange(clients) % 2,
        },
        x=x,
        time=0.5 + torch.rand(n, generator=g),
        part=torch.arange(n) % 3,
        y=level[which] + 0.5 * x[:, 0] + 0.7 * torch.randn(n, generator=g),
        ill=(torch.rand(n, generator=g) < level[which].sigmoid()).to(x.dtype),
        visits=torch.poisson(level[which].exp(), generator=g),
    )


_READ: dict[Any, Program] = {}


def program_of(model: Any, data: ClientData | None = None) -> Program:
    """Return the program of a model, which lacks a guide; on `people()` it is read once."""
    if data is not None:
        return read_model(model, data).program
    if model not in _READ:
        _READ[model] = read_model(model, people()).program
    return _READ[model]


def rows_of_client(data: ClientData, k: int) -> ClientBatch:
    """Return all rows of client k."""
    return full_batch(data, torch.tensor([k]))


def packed_rows(line: Line, batch: ClientBatch) -> PackedRows:
    """Return the rows of a batch, in double precision."""
    return packed(UnitScore(line), batch)


def factor_of_rows(rows: PackedRows, loc: Tensor, covariance: Tensor) -> Factor:
    """Return the factors of clients that have none yet."""
    size = len(loc)
    none = Factor(
        torch.zeros(rows.clients, size, size), torch.zeros(rows.clients, size), torch.zeros(1)
    )
    return factor_of(
        rows, (loc, covariance), nodes_of(rows.line), none, torch.zeros(rows.clients) > 0.0
    )


# ------------------------------------------------------------------------------------ that are taken
def gaussian(batch: ClientBatch) -> None:
    """Means with known scales."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 0.7), obs=batch.y)


def spread(batch: ClientBatch) -> None:
    """Means with an unknown spread, centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 0.7), obs=batch.y)


def spread_raw(batch: ClientBatch) -> None:
    """`spread`, non-centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(mu + tau * e, 0.7), obs=batch.y)


def binary(batch: ClientBatch) -> None:
    """A logistic random intercept."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=a), obs=batch.ill)


def _correlated() -> tuple[Tensor, Tensor]:
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sds = pyro.sample("sds", dist.HalfNormal(torch.ones(2)).to_event(1))
    tril = pyro.sample("tril", dist.LKJCholesky(2, torch.tensor(2.0)))
    return loc, sds[..., None] * tril


def slopes_lkj(batch: ClientBatch) -> None:
    """Correlated slopes, centered."""
    loc, scale_tril = _correlated()
    with batch.clients():
        w = pyro.sample("w", dist.MultivariateNormal(loc, scale_tril=scale_tril))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.ill)


def slopes_lkj_raw(batch: ClientBatch) -> None:
    """`slopes_lkj`, non-centered."""
    loc, scale_tril = _correlated()
    with batch.clients():
        e = pyro.sample("e", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        w = loc + (scale_tril @ e[..., None])[..., 0]
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.ill)


def counts(batch: ClientBatch) -> None:
    """Poisson counts with an offset, a common slope, an indexed common vector, and a client field."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    lift = pyro.sample("lift", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu + lift * batch.height, tau))
        with batch.data():
            eta = batch.time.log() + a + slope * batch.x[..., 0] + level[batch.part]
            pyro.sample("visits", dist.Poisson(eta.exp()), obs=batch.visits)


def noisy(batch: ClientBatch) -> None:
    """Means and noise of unknown size."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def tails(batch: ClientBatch) -> None:
    """Student t rows with unknown scale and degrees of freedom."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    df = pyro.sample("df", dist.Gamma(4.0, 0.5))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.StudentT(df, a, sigma), obs=batch.y)


def dispersed(batch: ClientBatch) -> None:
    """Negative binomial counts with an unknown size."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    size = pyro.sample("size", dist.LogNormal(1.0, 0.5))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            fn = dist.NegativeBinomial(size, logits=a - size.log())
            pyro.sample("visits", fn, obs=batch.visits)


def gumbel(batch: ClientBatch) -> None:
    """A likelihood whose linear predictor hierfl does not know."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Gumbel(a, 0.9), obs=batch.y)


def chained(batch: ClientBatch) -> None:
    """Two local sites in a chain, LogNormal and Normal, whose prior reads client fields, and two observed sites."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    grand = pyro.sample("grand", dist.Normal(0.5 * mu, 0.7))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(grand, tau * batch.height.exp()))
        rate = pyro.sample("rate", dist.LogNormal(0.6 * a + mu - batch.height, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 0.7), obs=batch.y)
            pyro.sample("visits", dist.Poisson(rate * batch.time), obs=batch.visits)


def nested(batch: ClientBatch) -> None:
    """A plate of three parts within each client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(mu, tau).expand([3]).to_event(1))
        with batch.data():
            part = torch.nn.functional.one_hot(batch.part, 3).to(batch.x.dtype)
            pyro.sample("y", dist.Normal((part * (a + b)).sum(-1), 0.7), obs=batch.y)


def three_effects(batch: ClientBatch) -> None:
    """Three local unknowns, for which a client weighs by quasi-random points."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu.expand(3), 1.0).to_event(1))
        with batch.data():
            logits = a[..., 0] + (batch.x * a[..., 1:]).sum(-1)
            pyro.sample("ill", dist.Bernoulli(logits=logits), obs=batch.ill)


def years(batch: ClientBatch) -> None:
    """Rows with an effect of their year, and an intercept of each client's own."""
    effect = pyro.sample("effect", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(own + effect[batch.year], 0.7), obs=batch.y)


# ------------------------------------------------------------------------------------ grids
Grid = NDArray[np.float64]
GX, GW = np.polynomial.hermite_e.hermegauss(50)
GW = GW / GW.sum()


def grid(top: float = 5.0) -> tuple[Grid, Grid]:
    """Return a grid of (mu, tau)."""
    mu, tau = np.meshgrid(np.linspace(-6.0, 6.0, 161), np.linspace(0.005, top, 160), indexing="ij")
    return mu, tau


def posterior_on(
    mu: Grid, tau: Grid, log_prior: Grid, log_rows: list[Any], nodes: tuple[Grid, Grid] = (GX, GW)
) -> tuple[Grid, list[tuple[float, float]]]:
    """Return p(mu, tau | y) on a grid, and the mean and sd of each client's level.

    Args:
        mu: grid of the mean of levels.
        tau: grid of their sd.
        log_prior: log p(mu, tau) on it.
        log_rows: log likelihood of each client as a function of its level.
        nodes: values of (level - mu) / tau, and their weights; a Normal distribution's by default.
    """
    x, weights = nodes
    a = mu[..., None] + tau[..., None] * x
    logs = [rows(a) for rows in log_rows]
    each = [np.log((np.exp(log) * weights).sum(-1)) for log in logs]
    total = log_prior + sum(each)
    p = np.exp(total - total.max())
    p /= p.sum()
    levels = []
    for log, own in zip(logs, each, strict=True):
        share = p[..., None] * np.exp(log - own[..., None]) * weights
        mean = float((share * a).sum())
        levels.append((mean, float(np.sqrt((share * (a - mean) ** 2).sum()))))
    return p, levels


def moments(p: Grid, x: Grid) -> tuple[float, float]:
    """Return the mean and sd of x under p."""
    mean = float((p * x).sum())
    return mean, float(np.sqrt((p * (x - mean) ** 2).sum()))


def binary_rows(data: ClientData) -> list[Any]:
    """Return the log likelihood of `binary`, client by client."""

    def one(ill: Tensor) -> Any:
        ones, n = float(ill.sum()), len(ill)
        return lambda a: ones * a - n * np.logaddexp(0.0, a)

    return [one(ill) for ill in data.fields["ill"].split(data.counts.tolist())]


def gaussian_rows(data: ClientData, sigma: float = 0.7) -> list[Any]:
    """Return the log likelihood of `spread`, client by client."""

    def one(y: Tensor) -> Any:
        own = y.numpy()
        return lambda a: -0.5 * ((own - a[..., None]) ** 2).sum(-1) / sigma**2

    return [one(y) for y in data.fields["y"].split(data.counts.tolist())]


def curved(batch: ClientBatch) -> None:
    """A network with nine weights of each client, which no predictor is linear in."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(9), 0.1).to_event(1))
        with batch.data():
            hidden = (batch.x[..., :1] * w[..., :3] + batch.x[..., 1:] * w[..., 3:6]).tanh()
            pyro.sample("y", dist.Normal((hidden * w[..., 6:]).sum(-1).exp(), 1.0), obs=batch.y)
