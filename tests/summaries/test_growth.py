"""Curvatures of clients' likelihoods that grow with the scale of their rows."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, full_batch
from hierfl.core.gaussians import Factor
from hierfl.core.process import double_precision
from hierfl.data.batch import in_double
from hierfl.engine.federation import federate
from hierfl.methods.stages.two_stage import seen_in
from hierfl.program.handlers import unchecked
from hierfl.program.read import read_model
from hierfl.runs.ended import Fallback
from hierfl.summaries.factor import factor_of
from hierfl.summaries.growth import at_origin
from hierfl.summaries.packed_rows import packed

CLIENTS, STEPS = 5, 6
NOISE, MOVE, START = 0.4, 0.5, 2.0


def levels(batch: ClientBatch) -> None:
    """A random walk of each client, seen with noise: its own sites can have any values of the rows."""
    move, noise = (pyro.sample(name, dist.LogNormal(-1.0, 0.5)) for name in ("move", "noise"))
    with batch.clients():
        at = [pyro.sample("x_0", dist.Normal(0.0, START))]
        for t in range(1, STEPS):
            at.append(pyro.sample(f"x_{t}", dist.Normal(at[-1], move)))
        with batch.data():
            seen = dist.Normal(torch.stack(at, -1), noise).to_event(1)
            pyro.sample("y", seen, obs=batch.y)


def series() -> ClientData:
    rng = np.random.default_rng(1)
    steps = MOVE * rng.standard_normal((CLIENTS, STEPS))
    steps[:, 0] *= START / MOVE
    y = steps.cumsum(1) + NOISE * rng.standard_normal((CLIENTS, STEPS))
    return ClientData.from_arrays(np.arange(CLIENTS), y=torch.tensor(y).float())


def test_factors_follow_the_scale_of_the_rows() -> None:
    data = series()
    program = read_model(levels, data).program
    seen, batch = seen_in(program), full_batch(data, data.by_name)
    size, y = STEPS + 1, data.fields["y"][data.by_name].double()
    with double_precision(), unchecked(), torch.no_grad():
        rows = packed(seen.score, in_double(batch))
        none = Factor(torch.zeros(CLIENTS, size, size), torch.zeros(CLIENTS, size), y[:, 0] * 0.0)

        def about(belief: tuple[Tensor, Tensor]) -> Factor:
            return factor_of(rows, belief, seen.score.nodes, none, y[:, 0] > torch.inf)

        belief = torch.full((size,), math.log(NOISE)), torch.diag(torch.tensor([4.0] * 6 + [0.3]))
        factor, growth = at_origin(rows, seen.score.nodes, belief, about, STEPS)
        assert bool(growth.moves.all())
        inside, across = factor.precision[:, :STEPS].tensor_split([STEPS], 2)
        for away in (-2.0, 0.0, 1.0):
            u = belief[0][STEPS:] + away
            precision, shift = growth.of(inside, across, factor.shift[:, :STEPS], u)
            exact = (-2.0 * u).exp()
            close = partial(torch.testing.assert_close, rtol=0.1, atol=0.1 * float(exact))
            close(precision, (exact * torch.eye(STEPS)).expand_as(precision))
            close(shift, exact * y)


def test_chains_start_with_curvatures_that_grow_where_these_are_usable() -> None:
    method = hierfl.methods.two_stage(levels)
    starts = Fallback(federate(method, series().select([0, 1]), seed=0), None).chains._starts
    with double_precision(), torch.no_grad(), unchecked():
        g = torch.Generator().manual_seed(0)
        start = starts.heaviest(torch.randn(64, 2, generator=g, dtype=torch.float64))
        right, points = start.standard, start.points
        far = right._replace(shift=right.shift + 1e4)
        assert starts._are_usable(right, points, far, points)
        assert not starts._are_usable(far, points, right, points)
    rates = torch.full((2, STEPS, 1), -2.0)
    torch.testing.assert_close(right.growth.rates, rates, atol=1e-3, rtol=0.0)


@pytest.mark.slow
def test_chains_find_a_noise_that_clients_own_sites_could_do_without() -> None:
    data = series()
    fit = hierfl.fit(levels, data, seed=0)
    assert str(fit.summary().verdict).startswith("Trustworthy")
    # exact, by the marginal density at draws of the prior
    g = torch.Generator().manual_seed(0)
    move, noise = (0.5 * torch.randn(2, 20_000, generator=g, dtype=torch.float64) - 1.0).exp()
    path = torch.tril(torch.ones(STEPS, STEPS, dtype=torch.float64))
    path[:, 0] = 0.0
    eye = torch.eye(STEPS, dtype=torch.float64)
    covariance = START**2 + move[:, None, None] ** 2 * (path @ path.mT)
    covariance = (covariance + noise[:, None, None] ** 2 * eye)[:, None]
    density = dist.MultivariateNormal(eye[0] * 0.0, covariance)
    weights = density.log_prob(data.fields["y"].double()).sum(1).softmax(0)
    draws = fit.posterior(draws=2000, seed=0)["posterior"]
    for name, values in (("move", move), ("noise", noise)):
        mean = float(weights @ values)
        sd = float(weights @ (values - mean).square()) ** 0.5
        assert abs(float(draws[name].mean()) - mean) < 0.15 * sd
        assert 0.87 < float(draws[name].std()) / sd < 1.15
