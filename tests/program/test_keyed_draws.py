"""Keyed draws: each distribution's law, shapes with clients in any dimension, and unkeyed
distributions.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.transforms import AffineTransform, ExpTransform
from scipy import stats
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ProgramError
from hierfl.core import noise
from hierfl.program.handlers import KeyedNoise, NoKeyedDraw, draw, seeded
from hierfl.program.mixture import Mixture
from tests.programs import federation, fit, read

KEY = noise.fold(noise.root_key(1), noise.word("site"))
SIZE = 100_000
LAWS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "Normal": (dist.Normal(1.0, 2.0), stats.norm(1.0, 2.0).cdf),
    "LogNormal": (dist.LogNormal(0.3, 0.5), stats.lognorm(0.5, scale=2.718281828459045**0.3).cdf),
    "HalfNormal": (dist.HalfNormal(2.0), stats.halfnorm(scale=2.0).cdf),
    "Cauchy": (dist.Cauchy(1.0, 2.0), stats.cauchy(1.0, 2.0).cdf),
    "HalfCauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(scale=2.0).cdf),
    "Laplace": (dist.Laplace(1.0, 2.0), stats.laplace(1.0, 2.0).cdf),
    "Exponential": (dist.Exponential(2.0), stats.expon(scale=0.5).cdf),
    "Uniform": (dist.Uniform(-1.0, 3.0), stats.uniform(-1.0, 4.0).cdf),
    "Gumbel": (dist.Gumbel(1.0, 2.0), stats.gumbel_r(1.0, 2.0).cdf),
    "Weibull": (dist.Weibull(2.0, 1.5), stats.weibull_min(1.5, scale=2.0).cdf),
    "Pareto": (dist.Pareto(2.0, 3.0), stats.pareto(3.0, scale=2.0).cdf),
    "transformed": (
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), [AffineTransform(1.0, 0.5), ExpTransform()]
        ),
        stats.lognorm(0.5, scale=2.718281828459045).cdf,
    ),
    "masked": (dist.Normal(1.0, 2.0).mask(False), stats.norm(1.0, 2.0).cdf),
}


def mixture_cdf(value: Any) -> Any:
    return 0.3 * stats.norm(0.0, 1.0).cdf(value) + 0.7 * stats.norm(3.0, 1.0).cdf(value)


SHARES, MEANS = torch.tensor([0.3, 0.7]), torch.tensor([0.0, 3.0])
WITHOUT_A_GRADIENT: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "Gamma": (dist.Gamma(2.0, 3.0), stats.gamma(2.0, scale=1 / 3).cdf),
    "Gamma below 1": (dist.Gamma(0.3, 1.0), stats.gamma(0.3).cdf),
    "InverseGamma": (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0).cdf),
    "Chi2": (dist.Chi2(1.0), stats.chi2(1.0).cdf),
    "Beta": (dist.Beta(2.0, 0.7), stats.beta(2.0, 0.7).cdf),
    "StudentT": (dist.StudentT(3.0, 1.0, 2.0), stats.t(3.0, 1.0, 2.0).cdf),
    "masked Gamma": (dist.Gamma(1.0, 1.0).mask(False), stats.expon.cdf),
    "mixture": (
        dist.MixtureSameFamily(dist.Categorical(SHARES), dist.Normal(MEANS, 1.0)),
        mixture_cdf,
    ),
    "mixture of kinds": (
        Mixture(dist.Normal(MEANS[:, None], 1.0), SHARES.log()[:, None], 1),
        mixture_cdf,
    ),
}


@pytest.mark.usefixtures("global_generator_untouched")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *product((torch.float32, torch.float64), LAWS),
        *product((torch.float64,), WITHOUT_A_GRADIENT),
    ],
)
def test_law(name: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    fn, cdf = {**LAWS, **WITHOUT_A_GRADIENT}[name]
    value = draw(fn.expand([SIZE]), KeyedNoise(KEY, axis=0, reparameterized=name in LAWS))
    assert value.shape == (SIZE,)
    assert stats.kstest(value.double().numpy(), cdf).pvalue > 1e-3
    assert bool(fn.support.check(value).all())


def test_shares_of_small_concentrations_are_not_equal() -> None:
    """Gammas of them are below the smallest number; 17% of such draws were 0.5, 7% 1/3 each."""
    source = KeyedNoise(KEY, axis=0, reparameterized=False)
    assert (draw(dist.Beta(0.01, 0.01).expand([SIZE]), source) == 0.5).double().mean() < 1e-3
    shares = draw(dist.Dirichlet(torch.full((3,), 0.01)).expand([SIZE]), source)
    assert (shares.amax(-1) < 0.4).double().mean() < 1e-3


def test_a_mixture_of_kinds_has_the_moments_of_torchs() -> None:
    (kinds, _), (torchs, _) = (WITHOUT_A_GRADIENT[name] for name in ("mixture of kinds", "mixture"))
    for found, known in ((kinds.mean, torchs.mean), (kinds.variance, torchs.variance)):
        torch.testing.assert_close(found, known.expand(1))


def test_shares_of_gammas() -> None:
    fn = dist.Dirichlet(torch.tensor([0.5, 2.0, 3.0])).expand([SIZE])
    value = draw(fn, KeyedNoise(KEY, axis=0, reparameterized=False))
    for a, share in zip((0.5, 2.0, 3.0), value.T, strict=True):
        assert stats.kstest(share.double().numpy(), stats.beta(a, 5.5 - a).cdf).pvalue > 1e-3


TRIL = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [-0.3, 0.7, 0.4]], dtype=torch.float64)
FACTOR = torch.tensor([[1.0, 0.2], [0.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
LOC = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
VECTORS: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "MultivariateNormal": lambda: (dist.MultivariateNormal(LOC, scale_tril=TRIL), TRIL @ TRIL.T),
    "of a precision": lambda: (
        dist.MultivariateNormal(LOC, precision_matrix=(TRIL @ TRIL.T).inverse()),
        TRIL @ TRIL.T,
    ),
    "LowRank": lambda: (
        dist.LowRankMultivariateNormal(LOC, FACTOR, torch.tensor([0.1, 0.2, 0.3])),
        FACTOR @ FACTOR.T + torch.diag(torch.tensor([0.1, 0.2, 0.3])),
    ),
    "Independent": lambda: (
        dist.Normal(LOC, torch.tensor([1.0, 2.0, 3.0])).to_event(1),
        torch.diag(LOC.new([1.0, 4.0, 9.0])),
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_law_of_vectors(name: str) -> None:
    fn, covariance = VECTORS[name]()
    value = draw(fn.expand([SIZE]), KeyedNoise(KEY, axis=0))
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (value - LOC).T, upper=False
    )
    assert torch.allclose(torch.cov(white), torch.eye(3), atol=4.5 * (2.0 / SIZE) ** 0.5)
    for coordinate in white:
        assert stats.kstest(coordinate.numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(white.square().sum(0).numpy(), stats.chi2(3).cdf).pvalue > 1e-3


Made = Callable[[int], Any]
STACKED: dict[str, Made] = {
    "Normal": lambda c: dist.Normal(torch.zeros(3, c, 1, 2), 1.0).to_event(1),
    "LogNormal": lambda c: dist.LogNormal(torch.zeros(3, c, 1, 2), 1.0).to_event(1),
    "Uniform": lambda c: dist.Uniform(torch.zeros(3, c, 1), 1.0),
    "Laplace": lambda c: dist.Laplace(torch.zeros(3, c, 1, 2, 2), 1.0).to_event(2),
    "MultivariateNormal": lambda c: dist.MultivariateNormal(torch.zeros(3, c, 1, 5), torch.eye(5)),
    "LowRank": lambda c: dist.LowRankMultivariateNormal(
        torch.zeros(3, c, 1, 5), torch.ones(5, 2), torch.ones(5)
    ),
    "masked": lambda c: dist.Normal(0.0, 1.0).expand([3, c, 1]).mask(torch.ones(c, 1).bool()),
    "of gammas": lambda c: dist.StudentT(3.0, torch.zeros(3, c, 1, 2), 1.0).to_event(1),
    "shares": lambda c: dist.Dirichlet(torch.ones(3, c, 1, 4)),
    "mixture": lambda c: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3)), dist.Normal(torch.zeros(3, c, 1, 3, 2), 1.0).to_event(1)
    ),
    "mixture of kinds": lambda c: Mixture(
        dist.Normal(torch.zeros(2, 2, 3, c, 1, 2), 1.0).to_event(1),
        torch.zeros(2, 2, 1, 1, 1) - 1.386294,
        3,
    ),
    "to a simplex": lambda c: dist.TransformedDistribution(
        dist.Normal(torch.zeros(3, c, 1, 4), 1.0).to_event(1),
        [torch.distributions.StickBreakingTransform()],
    ),
}


@pytest.mark.parametrize("name", STACKED)
def test_a_client_draws_the_same_alone_and_among_others(name: str) -> None:
    keys, fn = noise.client_keys(["a", "b", "c", "d"]), STACKED[name](4)
    value = draw(fn, KeyedNoise(keys, axis=1, reparameterized=False))
    assert value.shape == fn.shape()
    assert len(value.flatten().unique()) == value.numel(), "every number is its own draw"
    for k in range(4):
        own = KeyedNoise(keys[k : k + 1], axis=1, reparameterized=False)
        alone = draw(STACKED[name](1), own)
        assert torch.allclose(alone[:, 0], value[:, k], rtol=1e-14, atol=1e-14)


def test_delta_has_no_noise() -> None:
    assert torch.equal(
        draw(dist.Delta(torch.tensor([1.0, 2.0])), KeyedNoise(KEY, 0)), torch.tensor([1.0, 2.0])
    )


def test_gradients_pass_through_a_draw() -> None:
    loc, scale = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    value = draw(dist.LogNormal(loc, scale), KeyedNoise(KEY, 0))
    by_loc, by_scale = torch.autograd.grad(value, [loc, scale])
    assert by_loc == pytest.approx(value.item())
    assert by_scale == pytest.approx((value * noise.normals(KEY, ())).item())


# ------------------------------------------------------------------ distributions without keyed
# draws
OTHERWISE = {
    "Gamma": dist.Gamma(2.0, 1.0),
    "Beta": dist.Beta(2.0, 1.0),
    "StudentT": dist.StudentT(3.0),
    "Dirichlet": dist.Dirichlet(torch.ones(3)),
    "Poisson": dist.Poisson(1.0),
    "Bernoulli": dist.Bernoulli(0.5),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_distributions_without_keyed_draws_are_named(name: str) -> None:
    with pytest.raises(NoKeyedDraw, match=name):
        draw(OTHERWISE[name], KeyedNoise(KEY, 0))
    with pytest.raises(NoKeyedDraw, match=name):
        draw(OTHERWISE[name].expand([2]).mask(False), KeyedNoise(KEY, 0))


@pytest.mark.usefixtures("global_generator_untouched")
@pytest.mark.parametrize("name", ["Gamma", "Beta", "StudentT"])
def test_torch_s_own_samplers_seeded_by_a_key(name: str) -> None:
    fn = OTHERWISE[name].expand([20_000])
    first = seeded(fn, KEY)
    assert torch.equal(first, seeded(fn, KEY[None]))
    assert not torch.equal(first, seeded(fn, noise.fold(KEY, 1)))
    law = {"Gamma": stats.gamma(2.0), "Beta": stats.beta(2.0, 1.0), "StudentT": stats.t(3.0)}[name]
    assert stats.kstest(first.numpy(), law.cdf).pvalue > 1e-3


def test_seeded_draws_are_of_one_client_and_reparameterized() -> None:
    with pytest.raises(NoKeyedDraw, match=r"Poisson .*no reparameterized draw"):
        seeded(dist.Poisson(1.0), KEY)
    with pytest.raises(NoKeyedDraw, match=r"Gamma .*one client"):
        seeded(dist.Gamma(torch.ones(2, 1), 1.0), noise.client_keys(["a", "b"]))
    with pytest.raises(NoKeyedDraw, match=r"Gamma .*one client"):
        torch.vmap(lambda key: seeded(dist.Gamma(2.0, 1.0), key))(noise.client_keys(["a", "b"]))


def rates(batch: ClientBatch) -> None:
    spread = pyro.sample("spread", dist.Gamma(2.0, 1.0))
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(2.0, spread))
        with batch.data():
            pyro.sample("visits", dist.Poisson(rate), obs=batch.visits)


def rates_guide(batch: ClientBatch) -> None:
    positive = dist.constraints.positive
    pyro.sample(
        "spread", dist.Gamma(pyro.param("shape", torch.tensor(2.0), constraint=positive), 1.0)
    )
    with batch.clients():
        own = pyro.param("own", torch.full((batch.num_clients, 1), 2.0), constraint=positive)
        pyro.sample("rate", dist.Gamma(own, 1.0))


@pytest.mark.usefixtures("global_generator_untouched")
def test_a_guide_without_keyed_draws_runs_one_client_at_a_time() -> None:
    data = federation((5, 3, 1))
    method = hierfl.methods.fedsvi(rates, rates_guide)
    with pytest.warns(UserWarning, match="site 'spread' is drawn from Gamma.*one at a time"):
        assert not read(rates, rates_guide, data).keyed
        runs = [fit(method, data, rounds=2, seed=2, engine=e) for e in ("vectorized", "sequential")]
        turned = fit(method, data.select(["east", "north", "south"]), rounds=2, seed=2)
        other = fit(method, data, rounds=2, seed=3)
    assert runs[0].history["elbo"].tolist() == runs[1].history["elbo"].tolist()
    assert turned.history["elbo"].tolist() == pytest.approx(
        runs[0].history["elbo"].tolist(), abs=1e-10
    )
    draws = [run.draws(20, seed=1) for run in runs]
    assert torch.equal(draws[0].own["rate"], draws[1].own["rate"])
    assert draws[0].own["rate"].shape == (20, 3)
    assert len(draws[0].own["rate"].unique()) == 60
    assert other.history["elbo"].tolist() != runs[0].history["elbo"].tolist()


def test_a_guide_without_reparameterized_draws_is_refused() -> None:
    def angle(batch: ClientBatch) -> None:
        at = pyro.sample("at", dist.Normal(0.0, 1.0))
        with batch.clients(), batch.data():
            pyro.sample("y", dist.Normal(at, 1.0), obs=batch.y)

    def guide(batch: ClientBatch) -> None:
        pyro.sample("at", dist.VonMises(0.0, 1.0))

    with pytest.raises(
        ProgramError,
        match="site 'at' of the guide is drawn from VonMises, which has no reparameterized draw",
    ):
        read(angle, guide, federation())
