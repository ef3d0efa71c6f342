"""Many chains side by side: right moments, R-hat that sees stuck chains, and scales near 0."""

import math
from typing import Any

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import t as student_t
from torch import Tensor

from hierfl import ClientBatch
from hierfl.core.chains import Sampled, Whitening, leaps_of, mixing_of, sampled, spread_of
from hierfl.core.process import double_precision
from hierfl.summaries import sampling
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.reading import read_likelihood
from hierfl.summaries.sampling import MIXED_WELL, Start, SurrogateDraws, bounds_of, sample
from hierfl.summaries.seen_hierarchy import seen_hierarchy
from hierfl.summaries.surrogate import DIGITS, Density, Surrogate, prior_draws
from tests.summaries import programs
from tests.summaries.programs import program_of

MEAN = torch.tensor([1.0, -20.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[4.0, 0.9], [0.9, 0.25]], dtype=torch.float64)


def gauss(z: Tensor) -> tuple[Tensor, Tensor]:
    slope = -(z - MEAN) @ COVARIANCE.inverse()
    return 0.5 * ((z - MEAN) * slope).sum(1), slope


def gumbel(z: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard Gumbel numbers: skewed, mean 0.5772, variance pi^2 / 6."""
    small = (-z).exp()
    return -(z + small).sum(1), small - 1.0


def run(density: Any, *, far: float = 3.0, **options: Any) -> Sampled:
    start = far * torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    whitening = Whitening(torch.zeros(2), torch.eye(2), torch.ones(0))
    how = {"seed": 0, "least": 60, "draws": 4000, "warmup": 80, "jumps": True, **options}
    return sampled(density, start, whitening, **how)


def test_moments_of_a_correlated_gaussian_far_away() -> None:
    found = run(gauss)
    assert found.r_hat < MIXED_WELL
    sd = COVARIANCE.diagonal().sqrt()
    assert ((found.draws.mean(0) - MEAN).abs() / sd < 0.08).all()
    assert torch.allclose(found.draws.T.cov(), COVARIANCE, rtol=0.1)


@pytest.mark.slow("1000")
@pytest.mark.parametrize("size", [2, 30, 1000])
def test_trajectories_are_as_long_as_is_said(size: int) -> None:
    gradients = 0

    def normal(z: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal gradients
        gradients += 1
        return -0.5 * z.square().sum(1), -z

    g = torch.Generator().manual_seed(1)
    whitening = Whitening(torch.zeros(size), torch.eye(2), torch.ones(size - 2))
    how: dict[str, Any] = {"draws": 32, "warmup": 60, "least": 60, "seed": 0, "jumps": False}
    sampled(normal, torch.randn(32, size, generator=g), whitening, **how)
    assert 0.5 < gradients / 120 / leaps_of(size) < 2.0


def test_moments_of_a_skewed_density() -> None:
    found = run(gumbel, far=1.0, least=300)
    assert found.r_hat < 1.1
    assert torch.allclose(found.draws.mean(0), torch.full((2,), 0.5772), atol=0.08)
    assert torch.allclose(found.draws.var(0), torch.full((2,), math.pi**2 / 6.0), rtol=0.12)
    third = (found.draws - found.draws.mean(0)).pow(3).mean(0) / found.draws.std(0) ** 3
    assert torch.allclose(third, torch.full((2,), 1.14), atol=0.35)


def test_chains_that_cannot_move_go_on_from_others() -> None:
    """Far to the left a Gumbel density falls as exp(-exp(9)): no trajectory of a step for the rest is accepted."""
    found = run(gumbel, far=3.0, least=300)
    assert found.r_hat < MIXED_WELL
    assert found.draws.min() > -3.5
    assert torch.allclose(found.draws.var(0), torch.full((2,), math.pi**2 / 6.0), rtol=0.15)


def two_modes(z: Tensor) -> tuple[Tensor, Tensor]:
    """A tenth of the mass is 8 sds from the other nine."""
    modes = z[:, None] - torch.tensor([[0.0, 0.0], [8.0, 0.0]])
    log_parts = torch.tensor([0.9, 0.1]).log() - 0.5 * modes.square().sum(2)
    slope = -(log_parts.softmax(1)[..., None] * modes).sum(1)
    return log_parts.logsumexp(1), slope


def test_chains_that_start_in_one_mode_jump_to_another() -> None:
    found = run(two_modes, far=1.0, least=300)
    assert abs(float((found.draws[:, 0] > 4.0).float().mean()) - 0.1) < 0.03
    assert found.r_hat < 1.1


def test_draws_are_a_function_of_the_seed() -> None:
    one, two, other = (run(gumbel, seed=seed, draws=100) for seed in (3, 3, 4))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, other.draws)


def test_r_hat_sees_chains_stuck_in_two_places() -> None:
    g = torch.Generator().manual_seed(0)
    chains = torch.randn(16, 60, 2, generator=g)
    assert mixing_of(chains)[0] < MIXED_WELL
    chains[:8, :, 1] += 1.0
    assert mixing_of(chains)[0] > MIXED_WELL
    drift = torch.randn(16, 60, 1, generator=g) + torch.linspace(0.0, 2.0, 60)[:, None]
    assert mixing_of(drift)[0] > MIXED_WELL


def test_r_hat_is_that_of_arviz_and_sees_chains_of_two_widths() -> None:
    """Of ranks and of folded ranks: Vehtari et al. 2021, equations 4.4 and 4.5."""
    g = torch.Generator().manual_seed(0)
    even = torch.randn(8, 200, 2, generator=g, dtype=torch.float64)
    wide = even.clone()
    wide[:4, :, 1] *= 2.5
    for chains in (even, wide, wide.exp()):
        r_hats = az.rhat({"x": chains.numpy()}, method="rank")["x"]  # type: ignore[no-untyped-call]
        assert mixing_of(chains)[0] == pytest.approx(float(r_hats.max()), abs=1e-3)
    assert mixing_of(even)[0] < MIXED_WELL < mixing_of(wide)[0]


@pytest.mark.slow
def test_the_tail_of_a_scale_is_reached() -> None:
    """A scale of few clients, a Student t number that is positive, is sampled by its log."""

    def density(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            log, other = z.unbind(1)
            size = log.exp()
            value = dist.StudentT(2.5).log_prob(size) + log
            value = value - 0.5 * (other - size.square().log1p()).square()
            (slope,) = torch.autograd.grad(value.sum(), z)
        return value.detach(), slope

    exact = math.log(student_t(2.5).ppf(0.995))
    found = [run(density, seed=seed, far=1.0, least=100, draws=6400) for seed in range(4)]
    errors = torch.stack([one.draws[:, 0].quantile(0.99) - exact for one in found])
    assert errors.square().mean().sqrt() < 0.1


# ------------------------------------------------------------------------------------ scales
def surrogate_of(model: Any) -> Surrogate:
    return Surrogate(seen_hierarchy(read_likelihood(program_of(model))))


def factors_of(eta: Tensor, precision: Tensor) -> Factors:
    return Factors(precision[:, None, None].double(), (eta * precision)[:, None].double(), {})


def drawn_of(
    surrogate: Surrogate, eta: Tensor, precision: Tensor, *, final: bool
) -> SurrogateDraws:
    with double_precision(), torch.no_grad():
        factors = factors_of(eta, precision)
        prior = prior_draws(surrogate.hierarchy, 0)
        equal = torch.full((len(prior),), -math.log(len(prior)))
        start = Start(prior, equal, bounds_of(surrogate, prior), True)
        return sample(surrogate, factors, 4000, start, final=final, seed=5)


def test_points_without_a_density_leave_finite_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covariance that rounding makes singular is NaN, as of a column 1,000 sds from 0."""
    plain = Density.at

    def with_holes(self: Density, x: Tensor) -> tuple[Tensor, ...]:
        holes = x[:, 0] > x[:, 0].quantile(0.9)
        return tuple(
            torch.where(holes.view(-1, *[1] * (v.ndim - 1)), torch.nan, v) for v in plain(self, x)
        )

    monkeypatch.setattr(Density, "at", with_holes)
    eta, precision = torch.linspace(-1.0, 1.0, 8), torch.ones(8)
    draws = drawn_of(surrogate_of(programs.spread), eta, precision, final=False)
    assert bool((draws.log_weights == -torch.inf).any())
    assert bool(draws.draws.isfinite().all())


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("by", ["weights", "chains"])
def test_draws_carry_the_density_of_the_surrogate(
    by: str, final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "chains":
        monkeypatch.setattr(sampling, "by_importance", lambda *args, **options: None)
    surrogate, eta = surrogate_of(programs.spread), torch.linspace(-1.0, 1.0, 8)
    drawn = drawn_of(surrogate, eta, torch.ones(8), final=final)
    with double_precision(), torch.no_grad():
        log_z, marginals = surrogate.log_marginals(drawn.draws, factors_of(eta, torch.ones(8)))
    assert torch.allclose(drawn.log_p, log_z + marginals.sum(1), rtol=0.0, atol=1e-6)


@pytest.mark.slow("chains")
@pytest.mark.parametrize("by", ["weights", "chains"])
def test_draws_of_scales_have_a_grids_moments(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight factors, almost no spread between them: tau's posterior piles up at 0."""
    if by == "chains":  # as where no proposal is good enough
        monkeypatch.setattr(sampling, "by_importance", lambda *args, **options: None)
    surrogate = surrogate_of(programs.spread)
    eta = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.4, -0.5, 0.2, -0.1])
    precision = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 2.0, 1.0, 0.7])
    found = drawn_of(surrogate, eta, precision, final=True)
    assert math.isnan(found.r_hat) == (by == "weights")
    assert torch.equal(found.log_weights, torch.full_like(found.log_weights, -math.log(4000)))
    tau = torch.linspace(0.0005, 5.0, 5000)
    mu = torch.linspace(-4.0, 4.0, 401)[:, None]
    spread = (tau.square() + 1.0 / precision[:, None]).sqrt()  # (8, T)
    log = dist.Normal(0.0, 2.0).log_prob(mu) + dist.HalfNormal(1.0).log_prob(tau)
    log = log + sum(dist.Normal(mu, s).log_prob(m) for m, s in zip(eta, spread, strict=True))
    p = (log - log.logsumexp((0, 1))).exp()
    for drawn, x in ((found.draws[:, 0], mu), (found.draws[:, 1].exp(), tau)):
        mean = (p * x).sum()
        sd = (p * (x - mean) ** 2).sum().sqrt()
        assert (drawn.mean() - mean).abs() < 0.08 * sd
        assert 0.92 < drawn.std() / sd < 1.08


def test_the_effective_number_counts_what_states_repeat() -> None:
    g = torch.Generator().manual_seed(0)
    fresh = torch.randn(16, 100, 2, generator=g)
    assert mixing_of(fresh)[1] > 1000
    kept = fresh[:, ::10].repeat_interleave(10, 1)
    assert mixing_of(torch.cat([fresh, kept], -1))[1] < 400


@pytest.mark.slow
def test_errors_of_sds_are_those_that_chains_have() -> None:
    """Of 1,000 sets of 4 chains: independent draws, and such that each is drawn five times."""
    g = torch.Generator().manual_seed(0)
    fresh = torch.randn(4, 200, 1000, generator=g)
    repeated = torch.randn(4, 40, 1000, generator=g).repeat_interleave(5, 1)
    for chains in (fresh, repeated):
        told = torch.tensor([spread_of(chains[..., k : k + 1])[1] for k in range(1000)]).mean()
        spread = chains.std((0, 1)).std()
        assert abs(float(told / spread) - 1.0) < 0.2


def test_a_far_mode_of_a_few_chains_shows_in_their_squares() -> None:
    """Of 64 chains two are in a mode of 3%, which ranks hardly show."""
    chains = torch.randn(64, 100, 1, generator=torch.Generator().manual_seed(0))
    assert spread_of(chains)[0] < MIXED_WELL
    chains[:2] += 6.0
    assert mixing_of(chains)[0] < spread_of(chains)[0] > 1.2


def test_prior_draws_and_bounds_of_vague_precisions_have_digits() -> None:
    """Of Gamma(0.001, 0.001) most draws are below e^-50: sums with other scales are then one of the two."""
    surrogate = surrogate_of(vague_precision)
    at = [site.name for site in surrogate.hierarchy.program.latents.global_block.sites].index("tau")
    prior = prior_draws(surrogate.hierarchy, 0)
    assert -DIGITS == float(prior[:, at].min()) < float(prior[:, at].max()) < 10.0
    # what is no log may be as far as its prior says
    assert float(prior[:, 1 - at].abs().max()) > DIGITS
    assert float(bounds_of(surrogate, prior)[:, at].abs().max()) == DIGITS


def vague_precision(batch: ClientBatch) -> None:
    """Declare a precision as BUGS's authors do, and a location whose unit is 1."""
    mu = pyro.sample("mu", dist.StudentT(1.0, 0.0, 10.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, tau**-0.5))
        with batch.data():
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)
