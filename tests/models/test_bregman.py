"""Bregman priors: closed forms against autograd and SciPy, and a convex g of the user's own.

The identities are those of section 1.9 of methods_in_depth.md, and the oracles O7 and O8 are from
there too.
"""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma
from torch import Tensor, nn
from torch.distributions import biject_to

import hierfl
from hierfl import guides, models
from hierfl.models.bregman import (
    BregmanPrior,
    bernoulli,
    exponential,
    gaussian,
    keep_inside,
    poisson,
)
from hierfl.models.bregman_network import BregmanKernel, Means
from tests.programs import federation

COV = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def interacting(s: Tensor) -> Tensor:
    """A g that is not separable: its numbers interact."""
    return 0.5 * s @ COV @ s


# two points in the domain of the means
REAL = torch.tensor([[0.3, -1.2], [1.0, 0.4]])
POSITIVE = torch.tensor([[0.2, 3.0], [1.5, 0.9]])
PRIORS: dict[str, tuple[BregmanPrior, Tensor]] = {
    "gaussian": (gaussian(), REAL),
    "gaussian with a precision": (gaussian(torch.tensor([4.0, 0.5])), REAL),
    "bernoulli": (bernoulli(), torch.tensor([[0.2, 0.7], [0.5, 0.9]])),
    "poisson": (poisson(), POSITIVE),
    "exponential": (exponential(), POSITIVE),
    "correlated, user-defined": (BregmanPrior(interacting), REAL),
    "cosh, user-defined": (BregmanPrior(torch.cosh), REAL),
}
CLOSED = {
    "gaussian": lambda x, m: 0.5 * (x - m).square(),
    "gaussian with a precision": lambda x, m: 0.5 * torch.tensor([4.0, 0.5]) * (x - m).square(),
    "bernoulli": lambda x, m: x * (x / m).log() + (1 - x) * ((1 - x) / (1 - m)).log(),
    "poisson": lambda x, m: x * (x / m).log() - x + m,
    "exponential": lambda x, m: x / m - (x / m).log() - 1.0,
}


def points(name: str) -> tuple[BregmanPrior, Tensor, Tensor]:
    prior, (x, mean) = PRIORS[name]
    return prior, x.double(), mean.double()


@pytest.mark.slow("correlated, user-defined")
@pytest.mark.parametrize("name", PRIORS)
def test_identities(name: str) -> None:
    prior, x, mean = points(name)
    s, u = prior.natural_of(mean), prior.natural_of(x)
    assert torch.allclose(prior.mean_of(s), mean, atol=1e-10)
    dual = prior.g(s).sum() - prior.g(u).sum() - (prior.mean_of(u) * (s - u)).sum()
    assert torch.allclose(prior.divergence(x, mean), dual, atol=1e-10), (
        "D_{g*}(x, mu) = D_g(s, grad g*(x))"
    )
    assert prior.divergence(x, mean) > 0.0
    assert abs(prior.divergence(mean, mean)) < 1e-12
    assert torch.allclose(prior._conjugate(x).sum(), (x * u).sum() - prior.g(u).sum(), atol=1e-10)
    y = 0.4 * x + 0.6 * mean
    three = prior.divergence(x, y) + prior.divergence(y, mean)
    three = three + ((prior.natural_of(y) - s) * (x - y)).sum()
    assert torch.allclose(prior.divergence(x, mean), three, atol=1e-10), "three-point identity"


@pytest.mark.parametrize("name", PRIORS)
def test_closed_forms_agree_with_autograd_and_newton(name: str) -> None:
    """Gradient, inverse and conjugate, and their derivatives, against those found from g alone."""
    prior, x, _ = points(name)
    bare = BregmanPrior(prior.g, natural=prior.natural, mean=prior.mean)
    s = prior.natural_of(x)
    assert torch.allclose(prior.mean_of(s), bare.mean_of(s), atol=1e-12)
    assert torch.allclose(s, bare.natural_of(x), atol=1e-10)
    assert torch.allclose(prior._conjugate(x).sum(), bare._conjugate(x).sum(), atol=1e-10)
    jacobian = torch.func.jacrev(prior.mean_of)(s)
    assert torch.allclose(prior.hessian(s), jacobian, atol=1e-10)
    assert torch.allclose(
        torch.func.jacrev(bare.natural_of)(x), torch.linalg.inv(jacobian), atol=1e-8
    )
    if prior.separable(s):
        assert torch.allclose(prior.curvature(s), jacobian.diagonal(), atol=1e-12)


@pytest.mark.parametrize("name", CLOSED)
def test_divergences_in_closed_form(name: str) -> None:
    prior, x, mean = points(name)
    assert torch.allclose(prior.terms(x, mean), CLOSED[name](x, mean), atol=1e-12)
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    samples = prior.mean_of(prior.natural_of(mean) + 0.1 * noise)

    def total(at: Tensor) -> Tensor:
        return torch.vmap(lambda v: prior.divergence(v, at))(samples).sum()

    assert torch.allclose(torch.func.grad(total)(samples.mean(0)), torch.zeros(2), atol=1e-8), (
        "argmin_m E D(X, m) = E X"
    )


def test_exponential_kernel_is_a_gamma_density_with_mode_mu() -> None:
    """Oracle O8."""
    lam, mean = 3.0, 0.8
    kernel = BregmanKernel(exponential(), torch.tensor([mean]), lam)

    def density(x: float) -> float:
        return math.exp(float(kernel.log_prob(torch.tensor([x]))))

    whole = quad(density, 0.0, 40.0)[0]
    for x in (0.1, 0.8, 2.5):
        assert density(x) / whole == pytest.approx(
            gamma(lam + 1.0, scale=mean / lam).pdf(x), rel=1e-7
        )


def test_unconstrained_values_are_natural_parameters() -> None:
    for name in ("bernoulli", "exponential", "cosh, user-defined"):
        prior, x, _ = points(name)
        transform = biject_to(Means(prior))
        assert torch.allclose(transform.inv(x), prior.natural_of(x)) and torch.allclose(
            transform(transform.inv(x)), x
        )
        slope = torch.func.jacrev(transform)(prior.natural_of(x)).diagonal()
        assert torch.allclose(transform.log_abs_det_jacobian(prior.natural_of(x), x), slope.log())
    assert Means(bernoulli()).check(torch.tensor([0.5, 1.5])).tolist() == [True, False]


def test_keep_inside_moves_a_value_halfway_to_the_bound() -> None:
    before, after = torch.tensor([-1.0, -1.0]), torch.tensor([-0.3, 0.2])
    assert keep_inside(exponential().natural, after, before).tolist() == [-0.3, -0.5]
    assert keep_inside(gaussian().natural, after, before).tolist() == [-0.3, 0.2]


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "exponential"])
def test_network_starts_at_the_module_and_its_kl_is_the_divergence(name: str) -> None:
    module = nn.Linear(2, 1)
    prior = PRIORS[name][0]
    model = models.bregman_network(module, prior, likelihood=models.likelihood.normal(1.0))
    data = federation((5, 3))
    program = hierfl.read(model, guides.delta, data)
    theta, mine = program.start()
    network = models.network(module, likelihood=models.likelihood.normal(1.0))
    plain = hierfl.read(network, guides.delta, data)
    batch = program.prototype
    terms = program.terms({**theta, **mine}, batch)
    assert torch.allclose(terms.nll, plain.terms(plain.start()[0], batch).nll)
    assert float(terms.local_kl) == pytest.approx(0.0, abs=1e-12)
    away = {k: 0.9 * v for k, v in mine.items()}
    x = torch.cat([prior.mean_of(v.flatten()) for v in away.values()])
    mean = torch.cat([prior.mean_of(v.flatten()) for v in theta.values()])
    kl = program.terms({**theta, **away}, batch).local_kl
    assert torch.allclose(kl, prior.divergence(x, mean), atol=1e-12)


def test_invalid_precision_and_sampling_raise() -> None:
    with pytest.raises(ValueError, match=r"precision is -1\.0: it must be > 0"):
        gaussian(-1.0)
    with pytest.raises(NotImplementedError, match=r"fit its sites with guides\.delta"):
        BregmanKernel(poisson(), torch.ones(2)).sample()
