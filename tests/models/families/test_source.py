"""Priors as text: the expression evaluates to an equal distribution."""

from typing import Any

import pyro.distributions as dist
import pytest
import torch

from hierfl.models import families
from hierfl.models.families import Ordered, Response, as_source
from hierfl.models.families.names import FAMILIES

NUMBERS = Response(3.7, 2.9)
LEVELS = Response(float("nan"), float("nan"), ("a", "b", "c"))

PRIORS: dict[str, Any] = {
    "dist.Normal(0.0, 1.0)": lambda: dist.Normal(0.0, 1.0),
    "dist.StudentT(3.0, 0.1, 2.5)": lambda: dist.StudentT(3.0, 0.1, 2.5),
    "dist.HalfNormal(0.5)": lambda: dist.HalfNormal(0.5),
    "dist.HalfCauchy(0.5)": lambda: dist.HalfCauchy(0.5),
    "dist.LogNormal(0.0, 0.3)": lambda: dist.LogNormal(0.0, 0.3),
    "dist.Exponential(2.0)": lambda: dist.Exponential(2.0),
    "dist.InverseGamma(0.4, 0.3)": lambda: dist.InverseGamma(0.4, 0.3),
    "dist.Gamma(2.0, 0.1)": lambda: dist.Gamma(2.0, 0.1),
    "dist.Beta(1.0, 2.0)": lambda: dist.Beta(1.0, 2.0),
    "dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0]))": lambda: dist.Dirichlet(
        torch.tensor([1.0, 2.0, 3.0])
    ),
    "dist.LKJCholesky(3, 2.0)": lambda: dist.LKJCholesky(3, 2.0),
    "dist.Normal(torch.tensor([0.0, 1.5]), torch.tensor([1.0, 1.0])).to_event(1)": lambda: (
        dist.Normal(torch.tensor([0.0, 1.5]), 1.0).to_event(1)
    ),
    "dist.Normal(0.0, 1.0).expand([4]).to_event(1)": lambda: (
        dist.Normal(0.0, 1.0).expand([4]).to_event(1)
    ),
    "dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 2.5))": lambda: families.half_student(1.0),
    "families.Ordered(dist.StudentT(3.0, 0.0, 2.5), 3)": lambda: Ordered(
        dist.StudentT(3.0, 0.0, 2.5), 3
    ),
    "dist.MultivariateNormal(torch.tensor([0.0, 0.0]), "
    "scale_tril=torch.tensor([[1.0, 0.0], [0.5, 1.0]]))": lambda: dist.MultivariateNormal(
        torch.zeros(2), scale_tril=torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    ),
}


def evaluated(source: str) -> Any:
    return eval(source, {"dist": dist, "torch": torch, "families": families})


def check_equal(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    assert first.shape() == second.shape() and first.event_shape == second.event_shape
    value = first.sample()
    torch.testing.assert_close(second.log_prob(value), first.log_prob(value), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", PRIORS)
def test_round_trip(source: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    prior = PRIORS[source]()
    assert as_source(prior) == source
    check_equal(prior, evaluated(source))


@pytest.mark.parametrize("name", [*FAMILIES, "piecewise_exponential"])
def test_default_priors_can_be_written_out_and_drawn_from(name: str) -> None:
    made = (
        families.piecewise_exponential((1.0, 2.0))
        if name == "piecewise_exponential"
        else families.named(name)
    )
    response = LEVELS if made.kind in ("category", "ordered") else NUMBERS
    for prior in made.parameters(response).values():
        check_equal(prior, evaluated(as_source(prior)))
        fn: Any = prior
        drawn = fn.sample((2000,))
        assert bool(fn.support.check(drawn).all()) and bool(drawn.isfinite().all())
    center, spread = made.scale(response)
    check_equal(
        families.intercept_prior(center, spread),
        evaluated(as_source(families.intercept_prior(center, spread))),
    )


def test_digits_that_only_double_precision_has() -> None:
    prior = dist.Normal(torch.tensor(1.0 / 3.0), torch.tensor(1e-7))
    check_equal(prior, evaluated(as_source(prior)))
    assert as_source(dist.Normal(float("1e30"), 1.0)) == "dist.Normal(1e+30, 1.0)"


def test_known_values() -> None:
    assert as_source(0.5) == "0.5"
    assert as_source(torch.tensor([1.0, 2.0])) == "torch.tensor([1.0, 2.0])"


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="MaskedDistribution cannot be written as an expression"):
        as_source(dist.Normal(0.0, 1.0).mask(False))
    with pytest.raises(TypeError, match="TransformedDistribution cannot be written"):
        as_source(
            dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.ExpTransform()])
        )
    with pytest.raises(ValueError, match="has 101 numbers, of which 100 can be written out"):
        as_source(dist.Normal(torch.arange(101.0), 1.0).to_event(1))
