"""Local sites that are not Normal: the server samples what they are Normal given."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

import hierfl
from hierfl import ClientBatch
from hierfl.summaries.hierarchy import Hierarchy
from hierfl.summaries.mixing import Mixing
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from tests.programs import fit
from tests.summaries.programs import (
    GW,
    GX,
    Grid,
    binary_rows,
    gaussian_rows,
    moments,
    people,
    posterior_on,
    program_of,
)

two_stage = hierfl.methods.two_stage
EIGHT = (1, 2, 3, 4, 5, 6, 7, 8)


def _above() -> tuple[Tensor, Tensor]:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    return mu, pyro.sample("tau", dist.HalfNormal(1.0))


def _gaussian(a: Tensor, batch: ClientBatch) -> None:
    with batch.data():
        pyro.sample("y", dist.Normal(a, 0.7), obs=batch.y)


def student(batch: ClientBatch) -> None:
    """Student t levels, binary rows."""
    mu, tau = _above()
    with batch.clients():
        a = pyro.sample("a", dist.StudentT(3.0, mu, tau))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=a), obs=batch.ill)


def offsets(batch: ClientBatch) -> None:
    """Student t levels, as offsets from mu."""
    mu, tau = _above()
    with batch.clients():
        _gaussian(mu + pyro.sample("e", dist.StudentT(3.0, 0.0, tau)), batch)


def scaled(batch: ClientBatch) -> None:
    """Student t levels, as offsets from mu in units of tau."""
    mu, tau = _above()
    with batch.clients():
        _gaussian(mu + tau * pyro.sample("e", dist.StudentT(3.0, 0.0, 1.0)), batch)


def horseshoe(batch: ClientBatch) -> None:
    """Normal levels with a scale of each client's own."""
    mu, tau = _above()
    with batch.clients():
        lam = pyro.sample("lam", dist.HalfCauchy(torch.ones(())))
        _gaussian(pyro.sample("a", dist.Normal(mu, tau * lam)), batch)


def double_exponential(batch: ClientBatch) -> None:
    """Laplace levels."""
    mu, tau = _above()
    with batch.clients():
        _gaussian(pyro.sample("a", dist.Laplace(mu, tau)), batch)


def two_levels(batch: ClientBatch) -> None:
    """Local sites that are all Normal or LogNormal, but the spread of one is the value of another."""
    mu, tau = _above()
    with batch.clients():
        lam = pyro.sample("lam", dist.LogNormal(torch.zeros(()), 1.0))
        _gaussian(pyro.sample("a", dist.Normal(mu, tau * lam)), batch)


def rates(batch: ClientBatch) -> None:
    """Gamma rates, of which none is Normal in any numbers."""
    shape = pyro.sample("shape", dist.LogNormal(0.5, 0.5))
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(shape, 1.0))
        with batch.data():
            pyro.sample("visits", dist.Poisson(rate), obs=batch.visits)


# ------------------------------------------------------------------------------------ right answers
def _middle(count: int) -> Grid:
    return (np.arange(count) + 0.5) / count


def _product(scales: Grid) -> tuple[Grid, Grid]:
    """Return nodes and weights of Normal numbers with the given scales, of equal weight."""
    return (scales[:, None] * GX).ravel(), np.tile(GW, len(scales)) / len(scales)


NODES: dict[str, Callable[[], tuple[Grid, Grid]]] = {
    "student": lambda: (stats.t.ppf(_middle(1000), 3), np.full(1000, 1.0 / 1000)),
    "offsets": lambda: (stats.t.ppf(_middle(1000), 3), np.full(1000, 1.0 / 1000)),
    "double_exponential": lambda: (stats.laplace.ppf(_middle(800)), np.full(800, 1.0 / 800)),
    "horseshoe": lambda: _product(stats.halfcauchy.ppf(_middle(60))),
    "two_levels": lambda: _product(stats.lognorm.ppf(_middle(40), 1.0)),
}
DRAWS = 500


@pytest.mark.slow
@pytest.mark.parametrize("name", NODES)
def test_the_posterior_is_that_of_a_grid(name: str) -> None:
    """mu, tau, and the middle and the width of every client's level, of eight clients of 1 to 8 rows."""
    data = people(EIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = fit(two_stage(globals()[name], draws=DRAWS), data)
    assert found.history["k_hat"].iloc[-1] < 0.7
    mu, tau = np.meshgrid(np.linspace(-5.0, 5.0, 31), np.linspace(0.02, 4.5, 45), indexing="ij")
    rows = binary_rows(data) if name == "student" else gaussian_rows(data)
    p, levels = posterior_on(mu, tau, -0.125 * mu**2 - 0.5 * tau**2, rows, NODES[name]())
    draws = found.draws(2000)
    for site, x in (("mu", mu), ("tau", tau)):
        mean, sd = moments(p, x)
        drawn = draws.shared[site].flatten()
        assert abs(drawn.mean() - mean) < 0.15 * sd, site
        assert 0.87 < drawn.std() / sd < 1.15, site
    if name == "offsets":
        own = (draws.shared["mu"].view(2000, 1, 1) + draws.own["e"].view(2000, 8, 1))[..., 0]
    else:
        own = draws.own["a"].view(2000, 8)
    for k, level in enumerate(levels):
        assert abs(own[:, k].mean() - level[0]) < 0.18 * level[1], k


# ------------------------------------------------------------------------------------ what is seen
def seen(model: Any) -> Hierarchy:
    return seen_hierarchy(read_likelihood(program_of(model)))


@pytest.mark.slow("offsets-sampled1-scattered1-linear1", "scaled-sampled2-scattered2-linear2")
@pytest.mark.parametrize(
    ("model", "sampled", "scattered", "linear"),
    [
        (student, (), ("a",), ("mu",)),
        (offsets, (), ("e",), ("mu",)),
        (scaled, (), ("e",), ("mu",)),
        (horseshoe, ("lam",), (), ("mu",)),
        (double_exponential, (), ("a",), ("mu",)),
        (two_levels, ("lam",), (), ("mu",)),
        (rates, ("rate",), (), ()),
    ],
)
def test_what_is_sampled_is_seen(
    model: Any, sampled: tuple[str, ...], scattered: tuple[str, ...], linear: tuple[str, ...]
) -> None:
    found = seen(model)
    assert isinstance(found.mixing, Mixing)
    assert (found.mixing.sampled, found.mixing.scattered) == (sampled, scattered)
    assert found.linear == linear
