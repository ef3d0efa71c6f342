"""Recipes: each public name, old name and value comes back from JSON as what it was."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides, methods, models, optimizers
from hierfl.models import bregman, likelihood, map_priors
from hierfl.program.differences import differences
from hierfl.program.old_records import translated
from hierfl.program.public_names import (
    MODULES_OF_0_1_0,
    NAMES,
    exported,
    public_name,
)
from hierfl.program.recipes import describe, remake
from hierfl.program.sites import Family

PUBLIC_NAMES = [f"{module}.{name}" for module, names in NAMES.items() for name in names]


def through_json(value: Any) -> Any:
    return remake(json.loads(json.dumps(describe(value))))


# ------------------------------------------------------------------ round trips
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_comes_back(name: str) -> None:
    thing = exported(*name.rsplit(".", 1))
    key = "family" if isinstance(thing, Family) else "named"
    assert describe(thing)[key] == name
    again = through_json(thing)
    if isinstance(thing, Family):
        assert isinstance(again, Family) and again.build is thing.build
    else:
        assert again is thing


def test_the_public_modules_are_those_of_hierfl() -> None:
    """Each exports something that a recipe can hold, and the factories of each are recorded."""
    assert {name.rsplit(".", 1)[0] for name in PUBLIC_NAMES} == set(NAMES)
    made_of_rows = {"hierfl.models.PersonalHeads"}  # a class that holds a module: no recipe can
    for module in ("hierfl.methods", "hierfl.models", "hierfl.models.likelihood"):
        for name in (name for name in PUBLIC_NAMES if name.rsplit(".", 1)[0] == module):
            thing = exported(*name.rsplit(".", 1))
            if name not in made_of_rows:
                assert isinstance(thing, type) or thing.__recorded__, name


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_no_default_is_private(name: str) -> None:
    """What a public factory takes by default has a public name, so that its recipe can be made again."""
    thing = exported(*name.rsplit(".", 1))
    if not name.startswith("hierfl.m") or not getattr(thing, "__recorded__", False):
        return
    for default in (p.default for p in inspect.signature(thing).parameters.values()):
        if default is not inspect.Parameter.empty:
            assert describe(through_json(default)) == describe(default)


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
    "torch's optimizer": lambda: optimizers.TorchOptimizer(torch.optim.NAdam, {"lr": 0.01}),
    "likelihoods": lambda: (likelihood.categorical(), likelihood.normal(dist.HalfNormal(2.0))),
    "a likelihood of one's own": lambda: likelihood.Likelihood(dist.Poisson),
    "priors of MAP": lambda: (map_priors.Isotropic(2.0), map_priors.LearnedVariance()),
    "guides": lambda: (
        guides.mean_field,
        guides.structured(shared=guides.spline_flow, full=False),
        guides.conditional(shared=guides.diagonal_normal, newton_steps=2),
    ),
    "a model and a guide of one's own": lambda: methods.fedsvi(model, guide),
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
    exact = "probs" not in vars(prior)  # else it comes back by its logits, which round
    tolerance = 0.0 if exact else 1e-14
    assert torch.allclose(again.log_prob(value), prior.log_prob(value), rtol=0.0, atol=tolerance)


def test_recipes_name_no_module_of_hierfl_that_is_not_public() -> None:
    record = json.dumps(describe(VALUES["guides"]()))
    assert "hierfl.guides.spline_flow" in record and "global_sites" not in record
    assert describe(models.likelihood.poisson())["made_by"] == "hierfl.models.likelihood.poisson"
    assert describe(bregman.poisson())["made_by"] == "hierfl.models.bregman.BregmanPrior"


# ------------------------------------------------------------------ names of 0.1.0
OLD_NAMES = {
    "hierfl.guides.shared:full_normal": "hierfl.guides.full_normal",
    "hierfl.guides.mean_field:mean_field": "hierfl.guides.mean_field",
    "hierfl.method:Method": "hierfl.Method",
    "hierfl.methods.ditto:local_only": "hierfl.methods.local_only",
    "hierfl.models.batch_norm:batch_norm_network": "hierfl.models.batch_norm_network",
    "hierfl.models.bayes_net:bayesian_network": "hierfl.models.bayesian_network",
    "hierfl.models.bayes_net:network": "hierfl.models.network",
    "hierfl.models.bregman_net:bregman_network": "hierfl.models.bregman_network",
    "hierfl.models.likelihood:Likelihood": "hierfl.models.likelihood.Likelihood",
    "hierfl.models.map_priors:InputConvex": "hierfl.models.map_priors.InputConvex",
    "hierfl.optimizers:TorchOptimizer": "hierfl.optimizers.TorchOptimizer",
    "pyro.distributions.torch:HalfNormal": "pyro.distributions.HalfNormal",
    "pyro.distributions.delta:Delta": "pyro.distributions.Delta",
    "torch.optim.nadam:NAdam": "torch.optim.NAdam",
    # Not public: as it was.
    "hierfl.models.bregman:_same": "hierfl.models.bregman:_same",
    "hierfl.guides.shared:nothing": "hierfl.guides.shared:nothing",
    "my_study:my_model": "my_study:my_model",
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_translated(old: str) -> None:
    assert public_name(old) == OLD_NAMES[old]
    record = {"made_by": old, "with": {"a": {"sequence": [{"named": old}, {"family": old}]}}}
    new = OLD_NAMES[old]
    assert translated(record) == {
        "made_by": new,
        "with": {"a": {"sequence": [{"named": new}, {"family": new}]}},
    }
    assert translated(translated(record)) == translated(record)


def test_a_retired_option_counts_only_where_it_was_used() -> None:
    old = {"model": None, "beta": 1.0, "fine_tune": False}
    record = {"made_by": "hierfl.methods.fedavg:fedavg", "with": old}
    assert translated(record) == {"made_by": "hierfl.methods.fedavg", "with": {"model": None}}
    record["with"] = {**old, "beta": 2.0}
    assert translated(record) == {
        "made_by": "hierfl.methods.over_relaxed",
        "with": {
            "method": {"made_by": "hierfl.methods.fedavg", "with": {"model": None}},
            "beta": 2.0,
        },
    }
    assert translated(translated(record)) == translated(record)
    mine = {"made_by": "my_study:my_method", "with": old}
    assert translated(mine) == mine


def test_every_factory_of_0_1_0_is_found_by_its_old_name() -> None:
    assert set(MODULES_OF_0_1_0) < set(NAMES)
    old = {
        "hierfl.methods": "bfi ditto fedabml fedavg fedbn fedlaplace fedmap fedsvi fedvi pfedbayes pfedbred pfedme pvi",
        "hierfl.models": "linear logistic map_network poisson softmax",
        "hierfl.guides": "amortized conditional constructed delta low_rank mean_field structured unrolled",
    }
    for module, names in old.items():
        for name in names.split():
            found = remake({"named": f"{module}.{name}:{name}"})
            assert found is getattr(import_module(module), name)


def test_an_option_that_an_earlier_record_does_not_hold_had_its_default() -> None:
    model = hierfl.models.softmax(2)
    for own_steps in (True, False):
        method = hierfl.methods.fine_tuned(hierfl.methods.ditto(model), own_steps=own_steps)
        now = describe(method)
        earlier = {**now, "with": {k: v for k, v in now["with"].items() if k != "own_steps"}}
        assert bool(differences(earlier, now).differs) != own_steps
