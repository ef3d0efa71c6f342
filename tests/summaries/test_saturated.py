"""Clients who can fit their rows exactly, against the Gaussian marginals of their rows.

Own unknowns and coefficients are integrated out, and 2^16 quasi-random points of the prior of the
scales are weighted by the likelihood that is left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.core.importance_sampling import normal_points
from tests.sampled import sampled

# covariance of the rows of a client at points (S, n, n), design (n, P), and rows of N clients (N, n)
Part = tuple[Tensor, Tensor, Tensor]
HALF = dist.HalfNormal(1.0)


def exact(points: Tensor, parts: Sequence[Part], prior: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return means and sds of points (S, K) of the prior, weighted by the rows' likelihood."""
    precision = torch.diag(torch.tensor(prior) ** -2.0).expand(len(points), -1, -1)
    shift, log_w = torch.zeros(len(points), len(prior)), torch.zeros(len(points))
    for covariance, x, y in parts:
        tril = torch.linalg.cholesky(covariance)
        inverse = torch.cholesky_inverse(tril)
        half = torch.einsum("snm,km->ksn", inverse, y)
        log_w -= 0.5 * torch.einsum("ksn,kn->s", half, y)
        log_w -= len(y) * tril.diagonal(dim1=1, dim2=2).log().sum(1)
        precision = precision + len(y) * x.mT @ inverse @ x
        shift = shift + half.sum(0) @ x
    if prior:
        tril = torch.linalg.cholesky(precision)
        solved = torch.linalg.solve_triangular(tril, shift[..., None], upper=False)
        log_w += 0.5 * solved.square().sum((1, 2)) - tril.diagonal(dim1=1, dim2=2).log().sum(1)
    w = log_w.softmax(0)
    assert 1.0 / w.square().sum() > 150.0
    mean = w @ points
    return mean, (w @ (points - mean).square()).sqrt()


def eye(scale: Tensor, n: int) -> Tensor:
    return scale[:, None, None] ** 2 * torch.eye(n)


def slopes(p: Tensor, rng: Any) -> tuple[Any, Any, list[Part], list[float]]:
    """Return twenty clients of two rows, with an intercept and a slope each."""
    x, a, b = np.array([0.0, 1.0]), 0.8 * rng.normal(size=20), 0.5 * rng.normal(size=20)
    y = a[:, None] + b[:, None] * x + 0.4 * rng.normal(size=(20, 2))
    rows = {"id": np.repeat(np.arange(20), 2), "x": np.tile(x, 20), "y": y.ravel()}
    made = formula("y ~ 0 + (1 + x || id)", "id")
    z = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    covariance = z @ torch.diag_embed(p[:, :2] ** 2) @ z.mT + eye(p[:, 2], 2)
    return made, pd.DataFrame(rows), [(covariance, torch.zeros(2, 0), torch.tensor(y))], []


def visits(p: Tensor, rng: Any) -> tuple[Any, Any, list[Part], list[float]]:
    """Return 25 patients seen three times, with a level, a slope and a curvature each."""
    t = np.array([-1.0, 0.0, 1.0])
    z = np.stack([np.ones(3), t, t**2], 1)
    own = np.array([1.0, 0.5, 0.0]) + np.array([0.8, 0.5, 0.3]) * rng.normal(size=(25, 3))
    y = own @ z.T + 0.4 * rng.normal(size=(25, 3))
    rows = {"id": np.repeat(np.arange(25), 3), "t": np.tile(t, 25), "y": y.ravel()}
    made = formula("y ~ t + I(t ** 2) + (1 + t + I(t ** 2) || id)", "id")
    design = torch.tensor(z - np.array([0.0, 0.0, (t**2).mean()]))  # the intercept is at the means
    of = torch.tensor(z)
    covariance = of @ torch.diag_embed(p[:, :3] ** 2) @ of.mT + eye(p[:, 3], 3)
    return made, pd.DataFrame(rows), [(covariance, design, torch.tensor(y))], [3.0, 2.0, 2.0]


def repeats(p: Tensor, rng: Any) -> tuple[Any, Any, list[Part], list[float]]:
    """Return patients of eight hospitals, one of five of whom was measured twice."""
    parts, frames = [], []
    for k in range(8):
        times = 1 + (rng.random(9) < 0.2)
        who = np.repeat(np.arange(9), times)
        own, level = 0.6 * rng.normal(size=9), 1.0 + 0.7 * rng.normal()
        y = level + own[who] + 0.5 * rng.normal(size=len(who))
        frames.append(pd.DataFrame({"h": f"h{k}", "id": [f"p{k}.{i}" for i in who], "y": y}))
        same = torch.tensor((who[:, None] == who) * 1.0)
        n = len(who)
        covariance = p[:, 0, None, None] ** 2 + p[:, 1, None, None] ** 2 * same + eye(p[:, 2], n)
        parts.append((covariance, torch.ones(n, 1), torch.tensor(y)[None]))
    return formula("y ~ 1 + (1 | h/id)", "h"), pd.concat(frames), parts, [3.0]


def process(p: Tensor, rng: Any) -> tuple[Any, Any, list[Part], list[float]]:
    """Return ten clients with a latent Gaussian process at eight weeks."""
    t = torch.arange(8.0)
    apart = (t[:, None] - t).square()
    truth = 0.64 * np.exp(-0.5 * apart.numpy() / 4.0) + 0.09 * np.eye(8)
    y = rng.multivariate_normal(np.zeros(8), truth, 10)

    def latent(batch: ClientBatch) -> None:
        amplitude = pyro.sample("amplitude", HALF)
        reach = pyro.sample("reach", HALF)
        noise = pyro.sample("noise", HALF)
        at = torch.exp(-0.5 * apart.to(reach) / (0.5 + reach) ** 2)
        covariance = amplitude**2 * at + 1e-3 * torch.eye(8)
        with batch.clients():
            f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(8), covariance))
            with batch.data():
                weeks = batch.week[..., None]
                level = torch.gather(f.expand(*batch.week.shape, 8), -1, weeks)
                pyro.sample("y", dist.Normal(level[..., 0], noise), obs=batch.y)

    which, week = np.repeat(np.arange(10), 8), np.tile(np.arange(8), 10)
    data = ClientData.from_arrays(which, y=y.ravel(), week=week)
    of = torch.exp(-0.5 * apart / (0.5 + p[:, 1, None, None]) ** 2)
    covariance = p[:, 0, None, None] ** 2 * of + 1e-3 * torch.eye(8) + eye(p[:, 2], 8)
    return latent, data, [(covariance, torch.zeros(8, 0), torch.tensor(y))], []


def formula(text: str, clients: str) -> hierfl.Formula:
    priors = {"sd": HALF, "sigma": HALF, "Intercept": dist.Normal(0.0, 3.0)}
    priors |= {"b": dist.Normal(0.0, 2.0)} if "t" in text else {}
    if "0 +" in text:
        del priors["Intercept"]
    return hierfl.formula(text, clients=clients, priors=priors)


@pytest.mark.parametrize("make", sampled([slopes, visits, repeats, process], [slopes]))
def test_clients_with_as_many_unknowns_as_rows(make: Callable[..., Any]) -> None:
    """With Gaussian factors sigma was 0.003 where 0.312 is right, and called trustworthy."""
    size = 4 if make is visits else 3
    points = normal_points(2**16, size, seed=1).abs()
    model, rows, parts, prior = make(points, np.random.default_rng(3))
    mean, sd = exact(points, parts, prior)
    found = hierfl.fit(model, rows, seed=0)
    assert len(found.history) == 1
    shared = found.draws(4000).shared
    names = [n for n in shared if n[:2] == "sd" or n in ("sigma", "amplitude", "reach", "noise")]
    drawn = torch.cat([shared[n].reshape(4000, -1) for n in names], 1)
    assert bool(((drawn.mean(0) - mean).abs() < 0.12 * sd).all()), (drawn.mean(0), mean, sd)
    assert bool(((drawn.std(0) / sd).log().abs() < 0.12).all()), (drawn.std(0), sd)
    assert str(found.summary()).count("\nTrustworthy") == 1
