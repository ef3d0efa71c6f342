"""Recipes: each public name and value comes back from JSON as what it was."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides, methods, models, optimizers
from hierfl.models import bregman, learned_priors, likelihood
from hierfl.program.public_names import NAMES, exported
from hierfl.program.recipes import describe, remake
from hierfl.program.sites import Family
from tests.programs import names_in_recipes

PUBLIC_NAMES = [f"{module}.{name}" for module, name in names_in_recipes()]


def through_json(value: Any) -> Any:
    return remake(json.loads(json.dumps(describe(value))))


# ------------------------------------------------------------------ round trips
def test_each_public_name_comes_back() -> None:
    for name in PUBLIC_NAMES:
        thing = exported(*name.rsplit(".", 1))
        key = "family" if isinstance(thing, Family) else "named"
        assert describe(thing)[key] == name
        again = through_json(thing)
        if isinstance(thing, Family):
            assert isinstance(again, Family) and again.build is thing.build, name
        else:
            assert again is thing, name


def test_the_public_modules_are_those_of_hierfl() -> None:
    """Each exports something that a recipe can hold, and the factories of each are recorded."""
    assert {name.rsplit(".", 1)[0] for name in PUBLIC_NAMES} == set(NAMES)
    made_of_rows = {"hierfl.models.PersonalHeads"}  # a class that holds a module: no recipe can
    for module in ("hierfl.methods", "hierfl.models", "hierfl.models.likelihood"):
        for name in (name for name in PUBLIC_NAMES if name.rsplit(".", 1)[0] == module):
            thing = exported(*name.rsplit(".", 1))
            if name not in made_of_rows:
                assert isinstance(thing, type) or thing.__recorded__, name


def test_no_default_is_private() -> None:
    """What a public factory takes by default has a public name: its recipe can be made again."""
    things = {n: exported(*n.rsplit(".", 1)) for n in PUBLIC_NAMES if n.startswith("hierfl.m")}
    made = {name: thing for name, thing in things.items() if getattr(thing, "__recorded__", False)}
    for name, thing in made.items():
        for default in (p.default for p in inspect.signature(thing).parameters.values()):
            if default is not inspect.Parameter.empty:
                assert describe(through_json(default)) == describe(default), name


@hierfl.model
def model(batch: Any) -> None:
    """A user's own model."""


@hierfl.guide(name="a guide of mine")
def guide(batch: Any) -> None:
    """A user's own guide."""


VALUES: dict[str, Callable[[], Any]] = {
    "numbers": lambda: (1, 2.5, True, None, "word", float("inf")),
    "tensors": lambda: {"a": torch.tensor([1.5, 2.5]), "b": torch.tensor([1, 2])},
    "optimizers": lambda: (optimizers.SGD(0.1, 0.5), optimizers.Adam(0.1, (0.5, 0.6))),
    "torch's optimizer": lambda: optimizers.TorchOptimizer(
        torch.optim.NAdam, {"lr": 0.01, "betas": (0.8, 0.9)}
    ),
    "likelihoods": lambda: (likelihood.categorical(), likelihood.normal(dist.HalfNormal(2.0))),
    "a likelihood of one's own": lambda: likelihood.Likelihood(dist.Poisson),
    "priors of MAP": lambda: (learned_priors.Isotropic(2.0), learned_priors.LearnedVariance()),
    "guides": lambda: (
        guides.mean_field,
        guides.structured(shared=guides.spline_flow, full=False),
        guides.conditional(shared=guides.diagonal_normal, newton_steps=2),
    ),
    "a model and a guide of one's own": lambda: methods.fedsvi(model, guide),
    "methods": lambda: (
        methods.fedavg(model, steps=3, prox=0.5, unit="epoch"),
        methods.pfedme(model, prox=3.0),
        methods.pfedbayes(model, optimizer=optimizers.Adam(0.1), kl_weight=3.0),
    ),
    "regressions": lambda: (
        models.regression("bernoulli"),
        models.regression("gaussian", prior_scale=dist.HalfNormal(2.0)),
        models.regression("gaussian", prior_scale=torch.tensor([0.5, 2.0])),
    ),
}
PRIORS: dict[str, Callable[[], Any]] = {
    "Beta": lambda: dist.Beta(2.0, 3.0),
    "Cauchy": lambda: dist.Cauchy(0.0, 2.0),
    "Exponential": lambda: dist.Exponential(2.0),
    "Gamma": lambda: dist.Gamma(2.0, 3.0),
    "HalfCauchy": lambda: dist.HalfCauchy(2.0),
    "HalfNormal": lambda: dist.HalfNormal(torch.tensor([1.0, 2.0])),
    "InverseGamma": lambda: dist.InverseGamma(2.0, 3.0),
    "Laplace": lambda: dist.Laplace(0.0, 2.0),
    "LogNormal": lambda: dist.LogNormal(0.0, 2.0),
    "LowRankMultivariateNormal": lambda: dist.LowRankMultivariateNormal(
        torch.zeros(2), torch.ones(2, 1), torch.ones(2)
    ),
    "MultivariateNormal": lambda: dist.MultivariateNormal(
        torch.zeros(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    ),
    "Normal": lambda: dist.Normal(0.0, 2.5),
    "StudentT": lambda: dist.StudentT(3.0, 0.0, 2.0),
    "Uniform": lambda: dist.Uniform(0.0, 2.0),
    "Bernoulli": lambda: dist.Bernoulli(0.25),
    "Categorical": lambda: dist.Categorical(torch.tensor([0.25, 0.75])),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_value_comes_back(what: str) -> None:
    record = describe(VALUES[what]())
    assert describe(through_json(VALUES[what]())) == record


@pytest.mark.parametrize("what", PRIORS)
def test_a_prior_comes_back(what: str) -> None:
    prior = PRIORS[what]()
    assert describe(prior)["made_by"] == f"pyro.distributions.{what}"
    again = through_json(prior)
    value = prior.sample()
    atol = 1e-14 if "probs" in vars(prior) else 0.0  # it comes back by its logits, which round
    assert torch.allclose(again.log_prob(value), prior.log_prob(value), rtol=0.0, atol=atol)


def test_recipes_name_no_module_of_hierfl_that_is_not_public() -> None:
    record = json.dumps(describe(VALUES["guides"]()))
    assert "hierfl.guides.spline_flow" in record and "global_sites" not in record
    assert describe(models.likelihood.poisson())["made_by"] == "hierfl.models.likelihood.poisson"
    assert describe(bregman.poisson())["made_by"] == "hierfl.models.bregman.BregmanPrior"
