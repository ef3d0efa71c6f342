"""Gaussian likelihoods: their sums are the rows, and one round gives the posterior."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, Fit, full_batch
from hierfl.core.process import double_precision
from hierfl.core.trees import tree_leaves
from hierfl.methods import two_stage
from hierfl.methods.stages.two_stage import seen_in
from hierfl.summaries.exact import explained, sums_of
from hierfl.summaries.packed_rows import packed
from tests.programs import fit
from tests.summaries import programs
from tests.summaries.programs import people, program_of


def scaled_rows(batch: ClientBatch) -> None:
    """Known scales of rows times an unknown one, and an offset."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            eta = batch.time + a + (batch.x * slope).sum(-1)
            pyro.sample("y", dist.Normal(eta, sigma * batch.time), obs=batch.y)


def times(batch: ClientBatch) -> None:
    """LogNormal responses, and rows that count twice."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data(), poutine.scale(scale=2.0):
            pyro.sample("time", dist.LogNormal(a, sigma), obs=batch.time)


def own_noise(batch: ClientBatch) -> None:
    """A noise scale of each client's own."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def two_noises(batch: ClientBatch) -> None:
    """A noise scale by kind of row."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.ones(3)).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Normal(a, sigma[batch.part]), obs=batch.y)


def moving_noise(batch: ClientBatch) -> None:
    """A noise scale that moves with the predictor."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.8))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0 + a.square()), obs=batch.y)


EXACT = (
    programs.gaussian,
    programs.spread,
    programs.spread_raw,
    programs.noisy,
    scaled_rows,
    times,
)
OTHERS = (
    programs.binary,
    programs.tails,
    programs.counts,
    own_noise,
    two_noises,
    moving_noise,
)


@pytest.mark.slow(
    "scaled_rows", "counts", "spread_raw", "tails", "noisy", "times", "spread", "own_noise"
)
@pytest.mark.parametrize("model", [*EXACT, *OTHERS], ids=lambda model: str(model.__name__))
def test_it_is_recognized_where_the_likelihood_is_gaussian(model: Any) -> None:
    found = seen_in(program_of(model))
    assert (found.hierarchy.spread is not None) is (model in EXACT)
    assert (found.spread is not None) is (model in (*EXACT, own_noise))


def by_sums(seen: Any, sums: Any, v: Tensor) -> Tensor:
    """Return the log likelihood of clients' sums at v (C, S, V), up to a constant of each client."""
    at = v[..., seen.score.line.rest].flatten(0, 1)
    by = torch.stack([seen.hierarchy.spread.of(z) ** -2 for z in at]).view(v.shape[:2])
    whole = sums.square + explained(sums.precision, sums.shift)
    found = 0.5 * (sums.num_rows[:, None] * by.log() - by * whole[:, None])
    found = found + by * (v @ sums.shift[..., None])[..., 0]
    return found - 0.5 * by * ((v @ sums.precision) * v).sum(-1)


@pytest.mark.parametrize("model", EXACT, ids=lambda model: str(model.__name__))
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_sums_are_the_log_likelihood_of_the_rows_up_to_a_constant(model: Any, far: float) -> None:
    """At random values of the sites, and also where responses lie far from 0."""
    data = people()
    if far:
        fields = {**data.fields, "y": data.fields["y"].double() + far}
        data = ClientData(fields, data.offsets, data.names, data.client_fields)
    seen = seen_in(program_of(model))
    spread = seen.hierarchy.spread
    assert spread is not None
    with double_precision(), torch.no_grad():
        rows = packed(seen.score, full_batch(data, torch.arange(4)))
        sums = sums_of(rows, spread)
        assert not bool(sums.wrong.any())
        v = seen.score.start + torch.randn(4, 6, len(seen.score.start))
        known = rows.values(v)
        apart = known - by_sums(seen, sums, v)
    # a posterior does not care about the constant; sums of 1e8 keep 8 digits
    assert (apart - apart[:, :1]).abs().max() < (1e-9 if not far else 1e-6) * known.abs().max()


def fitted(model: Any, data: ClientData, **options: Any) -> Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "field 'y' has mean")
        return fit(two_stage(model, draws=4000), data, **options)


def test_the_posterior_is_that_of_a_grid() -> None:
    """Of mu, tau and sigma: the clients' levels integrate out."""
    data = people((8, 3, 7, 5, 2, 6))
    draws = fitted(programs.noisy, data).draws(4000).shared
    axes = (
        torch.linspace(-3.0, 3.5, 40),
        torch.linspace(0.02, 4.0, 50),
        torch.linspace(0.3, 2.2, 40),
    )
    mu, tau, sigma = torch.meshgrid(*(v.double() for v in axes), indexing="ij")
    log_p = -0.5 * (mu / 2.0) ** 2 - 0.5 * tau**2 - 0.5 * sigma**2
    for k in range(6):
        y = data.select([k]).fields["y"].double()
        n, mean, rest = len(y), y.mean(), (y - y.mean()).square().sum()
        spread = sigma**2 + n * tau**2
        log_p = log_p - (n - 1) * sigma.log() - 0.5 * spread.log() - 0.5 * rest / sigma**2
        log_p = log_p - 0.5 * n * (mean - mu) ** 2 / spread
    p = (log_p - log_p.max()).exp()
    for name, x in (("mu", mu), ("tau", tau), ("sigma", sigma)):
        mean = (p * x).sum() / p.sum()
        sd = ((p * (x - mean) ** 2).sum() / p.sum()).sqrt()
        drawn = draws[name].flatten()
        assert abs(drawn.mean() - mean) < 0.05 * sd, name
        assert abs(drawn.std() / sd - 1.0) < 0.05, name


def test_it_takes_one_round_in_which_everybody_answers() -> None:
    data = people((5, 3, 7, 4))
    whole, by_two = fitted(programs.noisy, data), fitted(programs.noisy, data, cohort=2, seed=3)
    assert len(whole.history) == 1
    assert set(by_two.history["clients"]) == {2}
    there, here = (f.draws(4000).shared["mu"] for f in (whole, by_two))
    assert abs(there.mean() - here.mean()) < 0.05 * there.std()


def test_clients_send_sums_and_nothing_else() -> None:
    found = fitted(programs.noisy, people((5, 3, 7, 4)))
    size = 2  # a and log sigma; two shares, each with its weight
    assert found.history["bytes_up"].iloc[0] == 8 * 4 * (size * size + size + 2 + 4)
    assert found.history["bytes_down"].iloc[0] == 0


def test_sums_that_do_not_fit_the_rows_are_refused() -> None:
    """A program whose rows are Gaussian only on the rows that it was read on."""

    def branching(batch: ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, 0.8))
            with batch.data():
                scale = torch.where(batch.y > 50.0, 1.0 + a.square(), torch.ones(()))
                pyro.sample("y", dist.Normal(a, scale), obs=batch.y)

    data = people((5, 3, 7))
    data.fields["y"][-1] = 60.0
    with pytest.raises(Exception, match="two_stage would be wrong"):
        fit(two_stage(branching), data)


@pytest.mark.slow("multivariate", "non-centered")
@pytest.mark.parametrize("how", ["centered", "non-centered", "multivariate"])
def test_series_with_a_step_for_each_row(how: str) -> None:
    """A latent random walk: as many own unknowns as rows, which a client could fit exactly."""
    clients, steps = 12, 5
    g = torch.Generator().manual_seed(2)
    walk = 0.4 * torch.randn(clients, steps, generator=g).cumsum(1)
    y = (walk + 0.5 * torch.randn(clients, steps, generator=g)).flatten()
    which = torch.arange(clients).repeat_interleave(steps)
    data = ClientData.from_arrays(which, y=y, step=torch.arange(steps).repeat(clients))

    def series(batch: ClientBatch) -> None:
        q = pyro.sample("q", dist.HalfNormal(1.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with batch.clients():
            if how == "centered":
                w = pyro.sample("w", dist.Normal(torch.zeros(steps), q).to_event(1))
            elif how == "non-centered":
                w = q * pyro.sample("z", dist.Normal(torch.zeros(steps), 1.0).to_event(1))
            else:
                normal = dist.MultivariateNormal(torch.zeros(steps), torch.eye(steps))
                w = q * pyro.sample("z", normal)
            with batch.data():
                passed = (torch.arange(steps) <= batch.step[..., None]).to(w.dtype)
                pyro.sample("y", dist.Normal((passed * w).sum(-1), s), obs=batch.y)

    draws = fitted(series, data).draws(4000).shared
    q, s = torch.meshgrid(*(torch.linspace(0.01, 1.6, 80),) * 2, indexing="ij")
    tril = torch.ones(steps, steps).tril()
    covariance = q[..., None, None] ** 2 * (tril @ tril.mT) + s[..., None, None] ** 2 * torch.eye(
        steps
    )
    normal = dist.MultivariateNormal(torch.zeros(steps), covariance)
    rows = y.view(clients, 1, 1, steps)
    log_p = normal.log_prob(rows).sum(0) - 0.5 * q**2 - 0.5 * s**2
    p = (log_p - log_p.max()).exp()
    for name, x in (("q", q), ("s", s)):
        mean = (p * x).sum() / p.sum()
        sd = ((p * (x - mean) ** 2).sum() / p.sum()).sqrt()
        assert abs(draws[name].mean() - mean) < 0.06 * sd, name
        assert abs(draws[name].std() / sd - 1.0) < 0.06, name


def unscaled(batch: ClientBatch) -> None:
    """Slopes of columns that may be nearly equal."""
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a + (batch.x * slope).sum(-1), sigma), obs=batch.y)


def test_the_slope_in_a_direction_that_is_not_solved_for_is_kept() -> None:
    g = torch.Generator().manual_seed(0)
    first, apart = torch.randn(2, 30, generator=g, dtype=torch.float64)
    x = torch.stack([100.0 * first, 100.0 * first + 2e-3 * apart], 1)
    y = 30.0 * torch.randn(30, generator=g, dtype=torch.float64) + 30.0 * apart
    client = torch.arange(30) // 15
    rows = ClientData.from_arrays(client, x=torch.randn(30, 2, generator=g), y=y)
    seen = seen_in(program_of(unscaled, rows))
    spread = seen.hierarchy.spread
    assert spread is not None
    near = ClientData({**rows.fields, "x": x}, rows.offsets, rows.names, rows.client_fields)
    with double_precision(), torch.no_grad():
        packed_rows = packed(seen.score, full_batch(near, torch.arange(2)))
        sums = sums_of(packed_rows, spread)
        assert not bool(sums.wrong.any())
        v = seen.score.start + torch.randn(2, 6, len(seen.score.start), generator=g)
        apart = packed_rows.values(v) - by_sums(seen, sums, v)
    assert (apart - apart[:, :1]).abs().max() < 1e-9 * packed_rows.values(v).abs().max()


def test_what_leaves_a_client_has_no_row() -> None:
    """Two clients whose rows differ but whose sums do not send the same."""
    seen = seen_in(program_of(programs.noisy))
    spread = seen.hierarchy.spread
    assert spread is not None
    with double_precision(), torch.no_grad():
        batches = []
        for y in ((-1.0, 1.0, 0.0, 0.0), (-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5)):
            data = people((4,))
            fields = {**data.fields, "y": torch.tensor(y)}
            made = ClientData(fields, data.offsets, data.names, data.client_fields)
            batches.append(full_batch(made, torch.arange(1)))
        one, other = (sums_of(packed(seen.score, batch), spread) for batch in batches)
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_noise_scale_with_a_lognormal_prior_is_no_linear_site() -> None:
    """Its logarithm is Normal: it was integrated as one of the means, and kept its prior."""
    g = torch.Generator().manual_seed(0)
    client, x = torch.arange(6).repeat_interleave(30), torch.randn(180, generator=g)
    y = 0.5 * x + client / 6.0 + 0.2 * torch.randn(180, generator=g)
    data = ClientData.from_arrays(client, names=list("abcdef"), x=x, y=y)

    def program(batch: ClientBatch) -> None:
        mu, slope = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("mu", "slope"))
        sigma = pyro.sample("sigma", dist.LogNormal(0.5, 0.5))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, 0.5))
            with batch.data():
                pyro.sample("y", dist.Normal(a + slope * batch.x, sigma), obs=batch.y)

    found = hierfl.fit(program, data, seed=0)
    assert len(found.history) == 1
    drawn = found.draws(2000).shared
    # of 173 degrees of freedom: the residual sd, and the sd of its estimate
    mean, sd = torch.zeros(6).index_add(0, client, x) / 30, 0.2
    within = float((x - mean[client]).square().sum())
    assert abs(float(drawn["sigma"].mean()) - sd) < 0.04
    assert float(drawn["sigma"].std()) == pytest.approx(sd / (2 * 173) ** 0.5, rel=0.2)
    assert float(drawn["slope"].std()) == pytest.approx(sd / within**0.5, rel=0.2)
