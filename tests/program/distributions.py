"""One valid parameterization of every distribution of Pyro, of one real number per batch entry."""

import inspect
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints, transforms
from torch.nn.functional import softplus

Make = Callable[[Tensor], Any]
EVERY: Any = dist  # of any release of torch and Pyro

# Not distributions of their own: abstract, or what pyro.factor is made of.
ABSTRACT = {"TorchDistribution", "ExponentialFamily", "Unit"}


def every_name() -> list[str]:
    """Return the names of all distributions that `pyro.distributions` exports."""
    kind = torch.distributions.Distribution
    names = (n for n in sorted(dir(dist)) if inspect.isclass(getattr(dist, n)))
    return [n for n in names if issubclass(getattr(dist, n), kind) and n not in ABSTRACT]


def row(e: Tensor, *weights: float) -> Tensor:
    """Return (*batch, len(weights)): e times each weight."""
    return e[..., None] * torch.tensor(weights)


def tril(e: Tensor, size: int = 2) -> Tensor:
    """Return a lower triangle with a positive diagonal, (*batch, size, size)."""
    return torch.eye(size) * softplus(e + 1.0)[..., None, None]


def rates(e: Tensor, *weights: float) -> Tensor:
    """Return positive numbers, (*batch, len(weights))."""
    return softplus(row(e, *weights) + 1.0)


def normal(e: Tensor, size: int = 2) -> Any:
    """Return a multivariate normal of the batch shape of e."""
    return dist.MultivariateNormal(row(e, *[1.0] * size), scale_tril=tril(e, size))


def mixture(e: Tensor) -> Any:
    """Return a mixture of two normals."""
    weights = dist.Categorical(logits=row(e, 0.5, -0.5))
    return dist.MixtureSameFamily(weights, dist.Normal(row(e, 1.0, -1.0), rates(e, 1.0, 0.5)))


def matrix(e: Tensor, *steps: int) -> Tensor:
    """Return identity matrices scaled by a number below 1, (*batch, *steps, 2, 2)."""
    scale = 0.5 * torch.sigmoid(e)
    return scale.reshape(*e.shape, *[1] * (len(steps) + 2)) * torch.eye(2).expand(*steps, 2, 2)


def over_time(e: Tensor, steps: int = 3) -> Any:
    """Return normals with a dimension of time, (*batch, steps)."""
    return normal(e[..., None].expand(*e.shape, steps))


def hmm(kind: Any, e: Tensor) -> Any:
    """Return a Gaussian or linear hidden Markov model of three steps."""
    return kind(normal(e), matrix(e, 3), over_time(e), matrix(e, 3), over_time(e))


def scales_of_hmm(e: Tensor) -> Any:
    """Return a Gaussian hidden Markov model whose scale is gamma distributed."""
    gamma = dist.Gamma(softplus(e) + 2.0, softplus(e) + 1.0)
    steps = (matrix(e, 3), over_time(e), matrix(e, 3), over_time(e))
    return dist.GammaGaussianHMM(gamma, normal(e), *steps)


def markov(e: Tensor) -> Any:
    """Return a hidden Markov model of two states over three steps."""
    at = e[..., None, None] * torch.tensor([1.0, -1.0])
    logits = (row(e, 1.0, 0.0), e[..., None, None, None] * torch.eye(2))
    return dist.DiscreteHMM(*logits, dist.Normal(at, 1.0), duration=3)


def unimodal(e: Tensor) -> Any:
    """Return a distribution drawn by rejection: a standard exponential."""
    accepted = torch.zeros_like(e)
    return dist.Rejector(dist.Exponential(torch.ones_like(e)), lambda x: 0.0 * x, accepted)


def angles(e: Tensor) -> Any:
    """Return a density of two correlated angles."""
    ones = torch.ones_like(e)
    return dist.SineBivariateVonMises(e, -e, ones + softplus(e), 2.0 * ones, correlation=0.2 * ones)


def independent_hmm(e: Tensor) -> Any:
    """Return two independent Gaussian hidden Markov models of one number a step."""
    pair = e[..., None].expand(*e.shape, 2)
    start = dist.MultivariateNormal(pair[..., None], scale_tril=tril(pair, 1))
    step = pair[..., None].expand(*pair.shape, 3)
    noise = dist.MultivariateNormal(step[..., None], scale_tril=tril(step, 1))
    by = 0.5 * torch.sigmoid(step)[..., None, None]
    return dist.IndependentHMM(dist.GaussianHMM(start, by, noise, by, noise))


def markov_field(e: Tensor) -> Any:
    """Return a Gaussian Markov random field of three steps."""
    pair = normal(e[..., None].expand(*e.shape, 3), 4)
    return dist.GaussianMRF(normal(e), pair, pair)


MAKE: dict[str, Make] = {
    "AVFMultivariateNormal": lambda e: dist.AVFMultivariateNormal(
        torch.zeros(2), torch.eye(2), torch.zeros(2, 1, 2)
    ),
    "AffineBeta": lambda e: dist.AffineBeta(
        softplus(e) + 1.0, softplus(-e) + 1.0, torch.zeros_like(e), 2.0 + torch.zeros_like(e)
    ),
    "AsymmetricLaplace": lambda e: dist.AsymmetricLaplace(e, softplus(e), softplus(-e)),
    "Bernoulli": lambda e: dist.Bernoulli(logits=e),
    "Beta": lambda e: dist.Beta(softplus(e) + 1.0, softplus(-e) + 1.0),
    "BetaBinomial": lambda e: dist.BetaBinomial(softplus(e) + 1.0, softplus(-e) + 1.0, 4),
    "Binomial": lambda e: dist.Binomial(4, logits=e),
    "Categorical": lambda e: dist.Categorical(logits=row(e, 1.0, -1.0, 0.5)),
    "Cauchy": lambda e: dist.Cauchy(e, softplus(e)),
    "Chi2": lambda e: dist.Chi2(softplus(e) + 2.0),
    "CoalescentTimes": lambda e: dist.CoalescentTimes(torch.zeros(*e.shape, 3), softplus(e)),
    "CoalescentTimesWithRate": lambda e: dist.CoalescentTimesWithRate(
        torch.zeros(*e.shape, 3), rates(e, 1.0, 1.0)
    ),
    "ContinuousBernoulli": lambda e: dist.ContinuousBernoulli(logits=e + 1.0),
    "Delta": lambda e: dist.Delta(torch.ones_like(e), log_density=e),
    "Dirichlet": lambda e: dist.Dirichlet(rates(e, 1.0, -1.0, 0.5)),
    "DirichletMultinomial": lambda e: dist.DirichletMultinomial(rates(e, 1.0, -1.0, 0.5), 4),
    "DiscreteHMM": markov,
    "Empirical": lambda e: dist.Empirical(
        torch.zeros(*e.shape, 3) + torch.arange(3.0),
        torch.zeros(*e.shape, 3) + row(e, 1.0, 0.0, 0.5),
    ),
    "ExpandedDistribution": lambda e: dist.ExpandedDistribution(
        dist.Normal(torch.zeros(()), torch.ones(())), e.shape
    ),
    "Exponential": lambda e: dist.Exponential(softplus(e)),
    "ExtendedBetaBinomial": lambda e: dist.ExtendedBetaBinomial(
        softplus(e) + 1.0, softplus(-e) + 1.0, torch.tensor(4.0)
    ),
    "ExtendedBinomial": lambda e: dist.ExtendedBinomial(torch.tensor(4.0), logits=e),
    "FisherSnedecor": lambda e: dist.FisherSnedecor(softplus(e) + 5.0, softplus(e) + 5.0),
    "FoldedDistribution": lambda e: dist.FoldedDistribution(dist.Normal(e, softplus(e))),
    "Gamma": lambda e: dist.Gamma(softplus(e) + 1.0, softplus(e)),
    "GammaGaussianHMM": scales_of_hmm,
    "GammaPoisson": lambda e: dist.GammaPoisson(softplus(e) + 1.0, softplus(e)),
    "GaussianHMM": lambda e: hmm(dist.GaussianHMM, e),
    "GaussianMRF": markov_field,
    "GaussianScaleMixture": lambda e: dist.GaussianScaleMixture(
        torch.ones(2), torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])
    ),
    "GeneralizedPareto": lambda e: EVERY.GeneralizedPareto(
        torch.zeros_like(e), softplus(e), 0.1 * torch.ones_like(e)
    ),
    "Geometric": lambda e: dist.Geometric(logits=e),
    "GroupedNormalNormal": lambda e: dist.GroupedNormalNormal(
        torch.zeros(2), torch.ones(2), torch.ones(3), torch.tensor([0, 0, 1])
    ),
    "Gumbel": lambda e: dist.Gumbel(e, softplus(e)),
    "HalfCauchy": lambda e: dist.HalfCauchy(softplus(e)),
    "HalfNormal": lambda e: dist.HalfNormal(softplus(e)),
    "ImproperUniform": lambda e: dist.ImproperUniform(
        constraints.positive, e.shape, torch.Size(())
    ),
    "Independent": lambda e: dist.Independent(dist.Normal(row(e, 1.0, -1.0), 1.0), 1),
    "IndependentHMM": independent_hmm,
    "InverseGamma": lambda e: dist.InverseGamma(softplus(e) + 3.0, softplus(e)),
    "Kumaraswamy": lambda e: dist.Kumaraswamy(softplus(e) + 1.0, softplus(-e) + 1.0),
    "LKJ": lambda e: dist.LKJ(2, softplus(e) + 1.0),
    "LKJCholesky": lambda e: dist.LKJCholesky(2, softplus(e) + 1.0),
    "LKJCorrCholesky": lambda e: dist.LKJCorrCholesky(2, softplus(e) + 1.0),
    "Laplace": lambda e: dist.Laplace(e, softplus(e)),
    "LinearHMM": lambda e: hmm(dist.LinearHMM, e),
    "LogNormal": lambda e: dist.LogNormal(e, softplus(e)),
    "LogNormalNegativeBinomial": lambda e: dist.LogNormalNegativeBinomial(
        torch.tensor(3.0), e, softplus(e)
    ),
    "Logistic": lambda e: dist.Logistic(e, softplus(e)),
    "LogisticNormal": lambda e: dist.LogisticNormal(row(e, 1.0, -1.0), rates(e, 1.0, 0.5)),
    "LowRankMultivariateNormal": lambda e: dist.LowRankMultivariateNormal(
        row(e, 1.0, -1.0), rates(e, 1.0, 0.5)[..., None], rates(e, 1.0, 1.0)
    ),
    "MaskedDistribution": lambda e: dist.Normal(e, 1.0).mask(torch.ones_like(e).bool()),
    "MaskedMixture": lambda e: dist.MaskedMixture(
        torch.zeros_like(e).bool(), dist.Normal(e, 1.0), dist.Normal(-e, 2.0)
    ),
    "MixtureOfDiagNormals": lambda e: dist.MixtureOfDiagNormals(
        torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2, 2), torch.zeros(2)
    ),
    "MixtureOfDiagNormalsSharedCovariance": lambda e: dist.MixtureOfDiagNormalsSharedCovariance(
        torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2), torch.zeros(2)
    ),
    "MixtureSameFamily": mixture,
    "Multinomial": lambda e: dist.Multinomial(4, logits=row(e, 1.0, -1.0, 0.5)),
    "MultivariateNormal": normal,
    "MultivariateStudentT": lambda e: dist.MultivariateStudentT(
        softplus(e) + 4.0, row(e, 1.0, -1.0), tril(e)
    ),
    "NanMaskedMultivariateNormal": lambda e: dist.NanMaskedMultivariateNormal(
        row(e, 1.0, -1.0), scale_tril=tril(e)
    ),
    "NanMaskedNormal": lambda e: dist.NanMaskedNormal(e, softplus(e)),
    "NegativeBinomial": lambda e: dist.NegativeBinomial(3.0, logits=e),
    "Normal": lambda e: dist.Normal(e, softplus(e)),
    "OMTMultivariateNormal": lambda e: dist.OMTMultivariateNormal(torch.zeros(2), torch.eye(2)),
    "OneHotCategorical": lambda e: dist.OneHotCategorical(logits=row(e, 1.0, -1.0, 0.5)),
    "OneHotCategoricalStraightThrough": lambda e: dist.OneHotCategoricalStraightThrough(
        logits=row(e, 1.0, -1.0, 0.5)
    ),
    "OneOneMatching": lambda e: dist.OneOneMatching(0.3 * torch.eye(3)),
    "OneTwoMatching": lambda e: dist.OneTwoMatching(0.3 * torch.eye(2).repeat(2, 1)),
    "OrderedLogistic": lambda e: dist.OrderedLogistic(e, torch.tensor([-1.0, 1.0])),
    "Pareto": lambda e: dist.Pareto(torch.ones_like(e), softplus(e) + 3.0),
    "Poisson": lambda e: dist.Poisson(softplus(e)),
    "ProjectedNormal": lambda e: dist.ProjectedNormal(row(e, 1.0, -1.0)),
    "Rejector": unimodal,
    "RelaxedBernoulli": lambda e: dist.RelaxedBernoulli(torch.tensor(0.5), logits=e),
    "RelaxedBernoulliStraightThrough": lambda e: dist.RelaxedBernoulliStraightThrough(
        torch.tensor(0.5), logits=e
    ),
    "RelaxedOneHotCategorical": lambda e: dist.RelaxedOneHotCategorical(
        torch.tensor(0.5), logits=row(e, 1.0, -1.0, 0.5)
    ),
    "RelaxedOneHotCategoricalStraightThrough": (
        lambda e: dist.RelaxedOneHotCategoricalStraightThrough(
            torch.tensor(0.5), logits=row(e, 1.0, -1.0, 0.5)
        )
    ),
    "SineBivariateVonMises": angles,
    "SineSkewed": lambda e: dist.SineSkewed(
        dist.VonMises(row(e, 1.0, -1.0), rates(e, 1.0, 0.5)).to_event(1),
        0.2 * torch.sigmoid(row(e, 1.0, 1.0)),
    ),
    "SkewLogistic": lambda e: dist.SkewLogistic(e, softplus(e), softplus(-e)),
    "SoftAsymmetricLaplace": lambda e: dist.SoftAsymmetricLaplace(e, softplus(e), softplus(-e)),
    "SoftLaplace": lambda e: dist.SoftLaplace(e, softplus(e)),
    "SpanningTree": lambda e: dist.SpanningTree(0.3 * torch.ones(3)),
    "Stable": lambda e: dist.Stable(torch.full_like(e, 1.5), torch.full_like(e, 0.1), 1.0, e),
    "StableWithLogProb": lambda e: dist.StableWithLogProb(
        torch.full_like(e, 1.5), torch.full_like(e, 0.1), torch.ones_like(e), e
    ),
    "StudentT": lambda e: dist.StudentT(softplus(e) + 3.0, e, softplus(e)),
    "TransformedDistribution": lambda e: dist.TransformedDistribution(
        dist.Normal(e, softplus(e)), [transforms.ExpTransform()]
    ),
    "TruncatedPolyaGamma": lambda e: dist.TruncatedPolyaGamma(torch.ones_like(e)),
    "Uniform": lambda e: dist.Uniform(torch.zeros_like(e), softplus(e) + 2.0),
    "VonMises": lambda e: dist.VonMises(e, softplus(e) + 1.0),
    "VonMises3D": lambda e: dist.VonMises3D(row(e, 1.0, -1.0, 0.5)),
    "Weibull": lambda e: dist.Weibull(softplus(e) + 1.0, softplus(-e) + 1.0),
    "Wishart": lambda e: dist.Wishart(softplus(e) + 3.0, scale_tril=tril(e)),
    "ZeroInflatedDistribution": lambda e: dist.ZeroInflatedDistribution(
        dist.Poisson(softplus(e)), gate_logits=-e
    ),
    "ZeroInflatedNegativeBinomial": lambda e: dist.ZeroInflatedNegativeBinomial(
        torch.tensor(3.0), logits=e, gate_logits=-e
    ),
    "ZeroInflatedPoisson": lambda e: dist.ZeroInflatedPoisson(softplus(e), gate_logits=-e),
}

# Values to observe of the distributions that Pyro cannot draw from.
VALUE: dict[str, Tensor] = {
    "CoalescentTimesWithRate": torch.tensor([-2.0, -1.0], dtype=torch.float64),
    "GammaGaussianHMM": torch.zeros(3, 2, dtype=torch.float64),
    "GaussianMRF": torch.zeros(3, 2, dtype=torch.float64),
    "GroupedNormalNormal": torch.zeros(3, dtype=torch.float64),
    "ImproperUniform": torch.tensor(1.0, dtype=torch.float64),
    "LogNormalNegativeBinomial": torch.tensor(2.0, dtype=torch.float64),
    "TruncatedPolyaGamma": torch.tensor(0.3, dtype=torch.float64),
    "VonMises3D": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
}
