"""What each method refuses, of its options and of programs that it is not for, and what it says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from hierfl import ClientBatch, guides, methods, models
from hierfl.guides.global_sites import low_rank_normal
from hierfl.methods import by_rows, fedmap, fedrep, fedsvi, ifca, robust, scaffold
from hierfl.models.learned_priors import Isotropic
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods import split_quadratics
from tests.methods.cases import embedded, mapped, net, personal, personal_alone, process, shared
from tests.methods.quadratics import START, at, clients
from tests.programs import federation, fit, learned, logistic, regression

Wrong = tuple[str, Callable[[], Any]]  # what is said, what is fitted (or refused when it is made)


def known() -> Any:
    """Return a network whose prior has a known scale."""
    return personal(prior_scale=1.0)


def at_the_module() -> Any:
    return models.bayesian_network(
        net(), prior_loc="module", prior_scale="learned", likelihood=normal(1.0)
    )


def headed(layer: str, module: nn.Module | None = None) -> Any:
    return models.HeadedNetwork(module or net(2), head=layer)


def hierarchical(batch: ClientBatch) -> None:
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.ones(2), scale).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def flat(batch: ClientBatch) -> None:
    theta = pyro.param("theta", torch.zeros(2))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal((batch.x * theta).sum(-1), 1.0), obs=batch.y)


def private(method: Any, **options: Any) -> Any:
    how: dict[str, Any] = {"clipping_norm": 1.0, "noise_multiplier": 1.0, **options}
    return methods.differentially_private(method, **how)


def averaged() -> Any:
    return methods.fedavg(shared(), steps=2, batch_size=2)


def some() -> Any:
    return methods.averaging_some(averaged(), share=0.5)


AVERAGES = "needs a method whose server averages"
ALONE = "uses what each client sends individually"
EQUAL = "components 0 and 1 start equal"
STEP = "step size must be 0 or more"
LEARNED = 'prior_scale="learned"'
NO_PARAM = r"prior's mean of site 'w\.\d\.\w+' is not a global param"
# fmt: off
REFUSED: list[Wrong] = [
    ("apfl fits global params only", lambda: methods.apfl(regression)),
    ("ditto fits global params only", lambda: methods.ditto(regression)),
    ("local_only fits global params only", lambda: methods.local_only(regression)),
    ("fedpa fits global params only", lambda: methods.fedpa(regression)),
    ("per_fedavg fits global params only", lambda: methods.per_fedavg(regression)),
    ("scaffold fits global params only", lambda: scaffold(regression)),
    (f"its {STEP}", lambda: methods.apfl(shared(), alpha_optimizer=SGD(-0.1))),
    ("without momentum, as alpha takes one clipped step",
     lambda: methods.apfl(shared(), alpha_optimizer=SGD(0.1, 0.9))),
    ("step size must be above 0", lambda: scaffold(shared(), optimizer=SGD(0.0))),
    ("without momentum, as its corrections are gradients",
     lambda: scaffold(shared(), optimizer=SGD(0.1, 0.9))),
    ("optimizer is Adam", lambda: scaffold(shared(), optimizer=Adam(0.1))),
    ("server_optimizer is SGD", lambda: scaffold(shared(), server_optimizer=SGD(1.0, 0.9))),
    (STEP, lambda: scaffold(shared(), server_optimizer=SGD(-1.0))),
    (f"by_rows {AVERAGES}", lambda: by_rows(scaffold(shared()))),
    (f"robust {AVERAGES}", lambda: robust(scaffold(shared(), optimizer=SGD(0.01)))),
    ("inner_optimizer is SGD", lambda: methods.per_fedavg(shared(), inner_optimizer=SGD(-1.0))),
    ("without momentum, as a client is fitted by one",
     lambda: methods.per_fedavg(shared(), inner_optimizer=SGD(0.1, 0.9))),
    # ---------------------------------------------------------------------- a body and a head
    ("fedrep needs a head, and all params of this model are global: give head=",
     lambda: fedrep(shared())),
    ('head: the rule matches every param .* which leaves fedrep no body: .* head="all"',
     lambda: fedrep(shared(), head="theta")),
    ("head: the pattern 'classifier' matches none of the model's params: theta",
     lambda: fedrep(shared(), head="classifier")),
    ("head: the prefix 'theta.9' matches none", lambda: fedrep(shared(), head=["theta.9"])),
    ("head: the predicate matches none", lambda: fedrep(shared(), head=lambda name: False)),
    ("fedrep fits params only, and this model has latent sites",
     lambda: fedrep(regression, head="loc")),
    ("fedbabu has nothing to learn together", lambda: methods.fedbabu(shared(), head="all")),
    ("the head is empty: use tune='all'",
     lambda: methods.fedbabu(shared(), head="none", tune="head")),
    ("fedbabu needs a head", lambda: methods.fedbabu(shared())),
    ("fedrecon has nothing to learn together", lambda: methods.fedrecon(shared(), head="all")),
    ("'fedrecon' does not",
     lambda: methods.server_optimized(methods.fedrecon(shared(), head="theta.2"), SGD(0.5))),
    ("with 4 of the module's 4 tensors", lambda: headed(
        "0", nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))))),
    ("module's layers are 0, 1, 2", lambda: headed("last")),
    ("HeadedNetwork", lambda: methods.fedpac(models.network(net(2)))),  # type: ignore[arg-type]
    ("module's layers are 0, 1, 2", lambda: models.MemoryNetwork(net(2), features="head")),
    (r"weight is 2\.0", lambda: models.MemoryNetwork(net(2), features="2", weight=2.0)),
    ("MemoryNetwork", lambda: methods.knn_per(models.network(net(2)))),  # type: ignore[arg-type]
    ("GaussianProcessNetwork", lambda: methods.pfedgp(shared())),
    ("classes is 1", lambda: process(classes=1)),
    # ---------------------------------------------------------------------- mixtures of models
    ("latent site 'loc'", lambda: methods.fedem(regression)),
    ("personalize_steps is 0", lambda: methods.fedem(shared(), personalize_steps=0)),
    (EQUAL, lambda: methods.fedem(flat, components=2)),
    (EQUAL, lambda: methods.fedhb_mixture(flat)),
    (EQUAL, lambda: ifca(flat, clusters=2)),
    ("latent sites or local params", lambda: methods.fedhb_mixture(known())),
    ("latent sites or local params", lambda: ifca(known())),
    (r"starts is not 3 sets of params", lambda: ifca(
        flat, clusters=3, starts=[{"theta": torch.full((2,), at)} for at in (1.0, 2.0)])),
    (f"by_rows {AVERAGES}", lambda: by_rows(ifca(shared(), clusters=2))),
    (f"robust {AVERAGES}", lambda: robust(ifca(shared(), clusters=2, optimizer=SGD(0.01)))),
    # ---------------------------------------------------------------------- hierarchies
    (r"has no start at the prior: use the guide delta, or mean_field",
     lambda: methods.fedabml(personal(prior_scale="learned"), guides.low_rank(rank=1))),
    ("fedabml needs local sites", lambda: methods.fedabml(shared())),
    ("leave meta at 'envelope'",
     lambda: methods.fedabml(personal(prior_scale="learned"), server="exact", meta="full")),
    ("fedmap needs local sites, and a learned prior", lambda: fedmap(shared())),
    (NO_PARAM, lambda: fedmap(at_the_module())),
    (r"variance is 0\.0: it must be in", lambda: Isotropic(0.0)),
    (NO_PARAM, lambda: methods.pfedbred(at_the_module())),
    (LEARNED, lambda: methods.pfedhb(known())),
    (LEARNED, lambda: methods.fedhb(known())),
    ('prior_scale="client"', lambda: methods.pfedvem(known())),
    ("draws", lambda: methods.pfedvem(personal(prior_scale="client"), draws=0)),
    ("local_features is 6: it must be in", lambda: models.PersonalHeads(
        nn.Linear(2, 6), outputs=1, features=6, local_features=6)),
    (r"the embedding gives shape \(6,\) per row, but features=7",
     lambda: methods.fedvi(models.PersonalHeads(
        nn.Linear(2, 6), outputs=1, features=7, local_features=2, likelihood=normal(1.0)))),
    (r"fedvi reads more .*: pass models\.PersonalHeads\(module, outputs=", lambda: methods.fedvi(regression)),  # type: ignore[arg-type]
    # ---------------------------------------------------------------------- posteriors
    ("fedpop needs local sites", lambda: methods.fedpop(flat)),
    *(("metropolis is True with", lambda short=short: methods.fedpop(
        known(), metropolis=True, **short))
      for short in ({"batch_size": 2}, {"steps": 1, "burn_in": 0}, {"temperature": 0.0})),
    ("is global", lambda: methods.fedwba(known())),
    ("levels is 128", lambda: methods.qlsd(personal_alone(), levels=128)),
    ("'slope' is local", lambda: methods.fola(logistic)),
    ("needs a prior of every unknown", lambda: methods.fedivon(shared())),
    ("depends on other sites", lambda: methods.fola(hierarchical)),
    ("draws is 3: it must be even", lambda: methods.pvi(logistic, draws=3)),
    ("'slope' is local", lambda: methods.pvi(logistic, loss="beta")),
    (r"damping is 1\.5", lambda: methods.fedep(logistic, damping=1.5)),
    ("even", lambda: methods.fedep(logistic, draws=3)),
    ("steps is 0: it must be in", lambda: methods.fedep(logistic, steps=0)),
    ("the global sites have 4 parameters", lambda: methods.fedep(regression, max_global_size=3)),
    ("must be even", lambda: methods.fedlaplace(regression, settle_draws=3)),
    (r"4 parameters \(2 of them in 'loc'\), and the limit is 3",
     lambda: methods.fedlaplace(regression, max_global_size=3)),
    ("param 'm' would be learned", lambda: methods.two_stage(learned)),
    ("start names 'b', which is not a global site: the global sites are ",
     lambda: methods.fedlaplace(regression, start={"b": 1.0})),
    ("is not a mean over clients", lambda: fedsvi(regression, merge="wasserstein")),
    ("averages Gaussians", lambda: fedsvi(
        regression, guides.structured(shared=low_rank_normal), merge="natural")),
    ("merge is 'mean'", lambda: fedsvi(regression, merge="mean")),  # type: ignore[arg-type]
    # ---------------------------------------------------------------------- wrappers
    ("mirror=True needs local sites and the guide delta",
     lambda: methods.fine_tuned(averaged(), mirror=True)),
    ("nothing to tune: the clients of 'fedvi' have latent sites",
     lambda: methods.fine_tuned(methods.fedvi(embedded(), hidden=4))),
    ("differentially_private needs a method whose server",
     lambda: private(scaffold(shared(), optimizer=SGD(0.1)))),
    (ALONE, lambda: private(methods.two_stage(regression))),
    ("leave quantized out", lambda: private(methods.quantized(averaged()))),
    ("differentially_private", lambda: private(fedmap(mapped()))),
    ("draw clients with fit", lambda: private(some())),
    ("draw clients with fit", lambda: private(replace(some(), name="of my own"))),
    ("below 1/4", lambda: private(averaged(), delta=0.25)),
    ("above 0", lambda: private(averaged(), delta=0.0)),
    *(("bfi sums what all clients know", lambda wrap=wrap: wrap(
        methods.bfi(logistic))) for wrap in (robust, methods.quantized)),
    *((f"{name} {ALONE}", lambda wrap=wrap, make=make: wrap(make()))
      for wrap in (robust, methods.quantized)
      for name, make in (
        ("two_stage", lambda: methods.two_stage(regression)),
        ("fedamp", lambda: methods.fedamp(shared(), sigma=9.0)))),
    (ALONE, lambda: methods.quantized(robust(averaged()))),
    ("'scaffold' does not",
     lambda: methods.quantized(scaffold(shared(), optimizer=SGD(0.01)))),
    ("'fedpa' does not", lambda: methods.quantized(methods.fedpa(shared()))),
    ("'fedavg.opt' does not",
     lambda: methods.quantized(methods.server_optimized(averaged(), SGD(1.0)))),
    ("'fedabml' sends moments, which is none", lambda: methods.quantized(
        methods.fedabml(personal(prior_scale="learned"), server="exact"))),
    ("'fedavg 8 bits' is in few bits already",
     lambda: methods.quantized(methods.quantized(averaged()))),
    ("Krum with 1 wrong clients needs 5 in a round, and there are 4",
     lambda: robust(averaged(), rule="krum", tolerated=0.4)),
    *((f"'{name}' does not", lambda wrap=wrap, make=make: wrap(make()))
      for name, make in (
        ("fedsvi", lambda: fedsvi(known())),
        ("fedmap", lambda: fedmap(mapped())),
        ("fedvi", lambda: methods.fedvi(embedded(), hidden=4)),
        ("bfi", lambda: methods.bfi(logistic)))
      for wrap in (methods.over_relaxed, by_rows, lambda m: methods.server_optimized(m, SGD(1.0)),
                   lambda m: methods.averaging_some(m, share=0.5))),
]
ON_QUADRATICS: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    (r"of each client \(v\), which are the head of fedrep: leave",
     lambda: fedrep(split_quadratics.at(plate=True), head="v"), split_quadratics.clients),
    (r"'w.at' has no such name: use hierfl.models.learned_prior_network",
     lambda: fedmap(at(START, personal=True), server=Isotropic().best), clients),
    (r"add up to 2, above 1: lower alpha \(1\)", lambda: methods.fedamp(
        at(START), sigma=1.0, optimizer=SGD(0.0), batch_size=None), clients),
    ("latent sites or local params", lambda: ifca(at(START, personal=True)), clients),
]
OF_A_FIT: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
    ("leave cohort=None", lambda: methods.clustered_fl(shared()), {"cohort": 2}),
    ("sums the updates of all clients", lambda: methods.fedlaplace(logistic), {"cohort": 2}),
    ("merge is 'natural': pooled rows", lambda: fedsvi(regression, merge="natural"), {"engine": "pooled"}),
    ("batch_size is 5: pooled rows", lambda: fedsvi(regression, batch_size=5), {"engine": "pooled"}),
]
# fmt: on


@pytest.mark.parametrize(
    ("says", "make", "data"), [*((*wrong, federation) for wrong in REFUSED), *ON_QUADRATICS]
)
def test_it_is_refused(says: str, make: Callable[[], Any], data: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        fit(make(), data(), rounds=1)


@pytest.mark.parametrize(("says", "make", "run"), OF_A_FIT)
def test_a_fit_is_refused(says: str, make: Callable[[], Any], run: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=says):
        fit(make(), federation((5, 3, 7)), rounds=2, **run)
