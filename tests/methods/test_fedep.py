"""FedEP: exact where all is Gaussian, sqrt(60) with diagonal factors, SEP with and without its prior, and moments."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientBatch, full_batch
from hierfl.methods import fedep, pvi
from hierfl.methods.posteriors.fedep import wide_points
from hierfl.methods.posteriors.natural_factors import no_factor
from tests.methods.test_pvi import MEAN, PRECISION, close, e1, gaussian, line
from tests.programs import federation, fit, slopes


@pytest.mark.slow
def test_diagonal_factors_tell_moments_from_reverse_kl() -> None:
    """EP's fixed point on E1 is sqrt(60) twice, VI's is 8, and the true marginal precision 7.5."""
    kept = {"factors": "diagonal", "damping": 0.5}
    loc, precision = gaussian(fit(fedep(line, **kept), e1(), rounds=30))  # type: ignore[arg-type]
    close(loc, MEAN, 1e-6)
    close(precision, 60.0**0.5 * torch.eye(2), 1e-6)
    _, other = gaussian(fit(pvi(line, **kept, steps=1), e1(), rounds=20))  # type: ignore[arg-type]
    close(other, 8.0 * torch.eye(2), 1e-5)


@pytest.mark.slow
def test_sep_keeps_the_prior_and_no_state() -> None:
    kept = fit(fedep(line, shared_factor=True), e1(), rounds=30)
    loc, precision = gaussian(kept)
    close(loc, MEAN, 1e-4)
    close(precision, PRECISION, 1e-4)
    assert not torch.utils._pytree.tree_leaves(kept.progress.table), "clients keep nothing"


def skewed(batch: ClientBatch) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.5))
    with batch.clients(), batch.data():
        pyro.sample("ill", dist.Bernoulli(logits=3.0 * w - 1.0), obs=batch.ill)


def test_one_client_has_the_moments_of_its_posterior() -> None:
    """Of a skewed posterior of one number, against sums over a grid; Laplace's mean and variance are far off."""
    data = federation((4,))
    ill = data.fields["ill"]
    grid = torch.linspace(-9.0, 9.0, 20001)
    density = dist.Normal(0.0, 1.5).log_prob(grid)
    density = density + dist.Bernoulli(logits=3.0 * grid[:, None] - 1.0).log_prob(ill).sum(1)
    weights = density.softmax(0)
    mean = float(weights @ grid)
    variance = float(weights @ (grid - mean).square())
    loc, precision = gaussian(fit(fedep(skewed, damping=1.0, draws=512), data, rounds=1))
    assert float(loc) == pytest.approx(mean, abs=0.01 * variance**0.5)
    assert float(1.0 / precision) == pytest.approx(variance, rel=0.02)
    other, its = gaussian(fit(pvi(skewed, damping=1.0, draws=64), data, rounds=3))
    assert abs(float(other) - mean) + abs(float(1.0 / its) - variance) > 0.05


@pytest.mark.slow
def test_with_too_few_points_a_client_sends_its_laplace_approximation() -> None:
    """One point of four bears nearly all weight; a covariance of one point would be 0."""
    method = fedep(slopes, damping=1.0, draws=2)
    client = fit(method, federation(), rounds=1).federation.client
    work = client.start({**no_factor(2)._asdict(), "precision": torch.eye(2)}, client.own)
    moments = client.phases[1].step
    far = work._replace(at=no_factor(2)._replace(precision=1e-8 * torch.eye(2)))
    found = moments(far, {}, full_batch(federation(), torch.tensor([0])))
    assert float(found.effective) * 8 < 4
    close(found.visit.q.precision, far.at.precision, 1e-12)


@pytest.mark.parametrize(("count", "size"), [(2, 3), (64, 5), (16, 1)])
def test_points_have_the_moments_of_a_standard_normal(count: int, size: int) -> None:
    points, log_weights = wide_points(count, size, 1)
    weights = log_weights.exp()
    assert len(points) == max(count, 4 * size)
    close(weights @ points, torch.zeros(size), 1e-12)
    close((weights[:, None] * points).T @ points, torch.eye(size), 1e-12)
    assert float(1.0 / weights.square().sum() / len(points)) > 0.25
