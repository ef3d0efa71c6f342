"""Methods that are another one at some setting: both give the same numbers."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import Method, guides, methods, models
from hierfl.core.trees import named_leaves
from hierfl.methods import by_rows, fedavg, local_only, pfedbred, pfedme
from hierfl.models import bregman
from hierfl.models.learned_priors import Isotropic, LearnedVariance
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods.cases import Make, around, common, learned, net, of, shared, units
from tests.methods.quadratics import START, at, equal_rows
from tests.methods.test_pvi import e1, line
from tests.programs import federation, fit, logistic, regression

Read = Callable[[hierfl.Fit], Mapping[str, Tensor]]


class Same(NamedTuple):
    """Two methods that are one, on clients of these rows, and what is read of each."""

    ours: Make
    theirs: Make
    mine: Read = lambda fitted: fitted.message
    other: Read = lambda fitted: fitted.message
    data: Any = (5, 3, 7, 1, 2)
    run: Mapping[str, Any] = {"rounds": 3}
    atol: float = 1e-10


def flat() -> Any:
    """Return the network of the cases with a prior so wide that it does not count."""
    wide = dist.Normal(0.0, 1e6)
    return models.bayesian_network(net(), local="none", global_prior=wide, likelihood=normal(1.0))


def narrow() -> Any:
    return models.bayesian_network(
        net(), prior_loc="module", prior_scale=1e-9, likelihood=normal(1.0)
    )


def gaussian() -> Any:
    return models.bregman_network(net(), bregman.gaussian(), likelihood=normal(1.0))


def classes() -> Any:
    return models.network(net(2), y="ill")


def remembering() -> Any:
    return models.MemoryNetwork(net(2), features="2", y="ill")


def quadratic() -> Any:
    return at(START)


def own_quadratics() -> Any:
    return at(START, personal=True)


def mapped(prior: Any, **options: Any) -> Make:
    how: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 2, "batch_size": 2, **options}

    def make() -> Method:
        model = models.learned_prior_network(net(), prior=prior, likelihood=normal(1.0))
        return methods.fedmap(model, **how)

    return make


def sent(entry: str) -> Read:
    """Read an entry of the server's message."""
    return lambda fitted: fitted.message[entry]


def kept(entry: str) -> Read:
    """Read an entry of the clients' states."""
    return lambda fitted: getattr(fitted.progress.table, entry)


def first(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    """Read the first of several models."""
    return {name: v[0] for name, v in fitted.message["theta"].items()}


def everything(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    """Read the message and the draws that points are."""
    return {**fitted.message, **{f"own {k}": v for k, v in fitted.draws(1).own.items()}}


def as_mapped(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    """Read clients' weights under FedMAP's names."""
    own = fitted.progress.table.params
    return {n.replace("theta.", "w.", 1) + ".at": v[:, None, None] for n, v in own.items()}


def particle(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    block = fitted.federation.program.latents.local_block
    values, _ = block.unflatten(fitted.message["particles"][:, None])
    return {n.replace("w.", "theta.", 1): v[0, 0] for n, v in values.items()}


def point(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    """Read the points of fedsvi under `delta` as a chain's state."""
    params = fitted.message["params"]
    return {"z": torch.cat([params[f"theta.0.{n}.at"].flatten() for n in ("weight", "bias")])}


def strict_lower(fitted: hierfl.Fit) -> Mapping[str, Tensor]:
    params = fitted.message["params"]
    return {n: v.tril(-1) if n == "_shared.lower" else v for n, v in params.items()}


ALL: dict[str, Any] = {"optimizer": SGD(0.05), "steps": 3, "batch_size": None}
STEP = {**ALL, "unit": "step"}
TWO_ROWS = {**ALL, "batch_size": 2}
SOME: dict[str, Any] = {"optimizer": SGD(0.05, 0.5), "steps": 2, "unit": "epoch", "batch_size": 2}
PLAIN, WHOLE = {**SOME, "optimizer": SGD(0.05)}, {**SOME, "batch_size": None}
PARTS: dict[str, Any] = {"optimizer": SGD(0.05, 0.5), "head_steps": 2, "body_steps": 2}
COHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "seed": 2}
HEAD = ("theta.2.weight", "theta.2.bias")
EQUAL = (4, 4, 4)  # rows, so that weights by rows are uniform ones
EM: dict[str, Any] = {"optimizer": SGD(0.02), "draws": 2, "steps": 2, "batch_size": 2}
CONSTANT: dict[str, Any] = {"schedule": "constant", "average": 0.0}
PROX: dict[str, Any] = {"prox": 2.0, "optimizer": SGD(0.02), "global_optimizer": SGD(0.03)}
BRED = {**PROX, "inner_steps": 2, "steps": 3, "batch_size": 2}
BREDS: dict[str, Any] = {"rounds": 2, "seed": 4, "cohort": 3}
CHAIN: dict[str, Any] = {"step_size": 0.01, "temperature": 0.0, "draws": 1}
ONE = of(fedavg, shared, **ALL)
FEDAVG, ALONE = of(fedavg, shared, **SOME), of(local_only, shared, **SOME)
QUANTIZED = around(methods.quantized, FEDAVG)
LEARNED_EM = of(methods.fedabml, learned, **EM, server="exact")
PVI = of(methods.pvi, line, draws=2, steps=1)

# fmt: off
PAIRS: dict[str, Same] = {
    # ------------------------------------------------------------------ FedAvg, FedProx, each alone
    "fedem, one component": Same(
        of(methods.fedem, shared, components=1, **STEP), ONE,
        lambda f: {n.removeprefix("0."): v for n, v in f.message.items()}),
    # mini-batches are drawn by phase: with all rows at each step they are the same
    "ifca, one cluster": Same(
        of(methods.ifca, shared, clusters=1, weights="rows", **ALL), ONE, first),
    "clustered_fl without halvings": Same(
        of(methods.clustered_fl, shared, mean_norm=0.0, warmup_rounds=0, **SOME), FEDAVG, kept("mail")),
    "fedhb_mixture, one network": Same(
        of(methods.fedhb_mixture, shared, networks=1, spread=0.8, **ALL),
        of(fedavg, shared, prox=1.0 / (5.0 * 0.64), **ALL), first,
        lambda f: {n: v * 4.0 / 4.64 for n, v in f.message.items()}, (5, 5, 5, 5), {"rounds": 1}),
    "fedamp without pull": Same(
        of(methods.fedamp, shared, prox=0.0, sigma=5.0, **STEP), of(local_only, shared, **STEP),
        kept("params"), kept("params")),
    "fedfomo without models": Same(
        of(methods.fedfomo, shared, models=0, **STEP), of(local_only, shared, **STEP),
        kept("last"), kept("params")),
    "fedbn without batch norm": Same(
        of(methods.fedbn, shared, **SOME), FEDAVG, run={"rounds": 3, "cohort": 4}),
    "ditto's common model": Same(of(methods.ditto, shared, prox=0.3, **SOME), FEDAVG),
    "ditto without pull": Same(
        of(methods.ditto, shared, prox=0.0, **SOME), ALONE, kept("params"), kept("params")),
    "fedmap with a frozen theta": Same(
        mapped(Isotropic(1.0 / 0.7), server="gradient", server_optimizer=SGD(0.0), **STEP),
        of(methods.ditto, shared, prox=0.7, personal_steps=3, **{**STEP, "steps": 0}),
        kept("params"), as_mapped),
    **{f"apfl's common model, alpha {alpha}": Same(
        around(by_rows, of(methods.apfl, shared, alpha=alpha, **SOME)), FEDAVG, run=COHORT)
        for alpha in (0.0, 0.4, 1.0)},
    "apfl, alpha 1": Same(
        of(methods.apfl, shared, alpha=1.0, **WHOLE), of(local_only, shared, **WHOLE),
        kept("v"), kept("params")),
    "knn_per's network": Same(
        of(methods.knn_per, remembering, **SOME), of(fedavg, classes, **SOME)),
    **{f"per_fedavg without an inner step, {meta}": Same(
        of(methods.per_fedavg, shared, inner_optimizer=SGD(0.0), meta=meta, **ALL), ONE)
        for meta in ("first", "hessian-free", "full")},
    "scaffold's first round": Same(
        of(methods.scaffold, shared, weights="rows", **PLAIN), of(fedavg, shared, **PLAIN),
        sent("theta"), run={"rounds": 1, "seed": 2}),
    **{f"fedpa's first rounds, batches of {size}": Same(
        of(methods.fedpa, shared, server_optimizer=SGD(1.0), epochs=2, batch_size=size,
           optimizer=SGD(0.05, 0.5), averaging_rounds=3),
        of(fedavg, shared, **{**SOME, "batch_size": size}), sent("theta"))
        for size in (None, 2)},
    "fedpa, one draw of one step": Same(  # which is the mean of its iterates and the last of them
        of(methods.fedpa, shared, server_optimizer=SGD(1.0), epochs=3, burn_in=2, shrinkage=5.0,
           batch_size=None, optimizer=SGD(0.05), averaging_rounds=0), ONE, sent("theta")),
    "fedwba, one particle": Same(
        of(methods.fedwba, narrow, particles=1, optimizer=SGD(0.05 / 4), steps=3, prior_width=1e6),
        ONE, particle, data=EQUAL, atol=1e-6),
    "fola without trust": Same(
        of(methods.fola, flat, trust=0.0, product=False, **TWO_ROWS), of(fedavg, shared, **TWO_ROWS),
        sent("z"), atol=1e-8),
    "fedivon without noise": Same(
        of(methods.fedivon, flat, lr=0.05, betas=(0.0, 1.0), curvature_start=1.0, temperature=0.0,
           steps=3, batch_size=2), of(fedavg, shared, **TWO_ROWS), sent("z"), atol=1e-8),
    "sfvi_avg of points": Same(
        of(methods.fedsvi, shared, guides.delta, merge="natural", global_steps=3, **CONSTANT,
           global_optimizer=SGD(0.05 / (3 * 4))), ONE, sent("params"), data=EQUAL),
    "pfedbred, one step from w": Same(
        of(pfedbred, own_quadratics, "none", prox=3.0, optimizer=SGD(0.05), inner_steps=1, steps=4,
           global_optimizer=SGD(0.2), inner_start="moved", batch_size=None),
        of(fedavg, quadratic, optimizer=SGD(0.2 * 3.0 * 0.05), steps=4, batch_size=None),
        data=equal_rows),
    **{f"fedmap restarted, {how}": Same(
        mapped(Isotropic(variance), restart="global", optimizer=optimizer),
        of(fedavg, shared, **{**SOME, "optimizer": optimizer}, prox=1.0 / variance),
        sent("gamma"), run={"rounds": 3, "cohort": 4})
        for how, variance, optimizer in (
            ("SGD", 0.5, SGD(0.05)), ("Adam", 0.5, Adam(0.02)), ("no prior", math.inf, SGD(0.05)))},
    # ------------------------------------------------------------------ a body and a head
    **{f"fedrep without a head, joint {joint}": Same(
        of(methods.fedrep, shared, head="none", joint=joint, batch_size=2, **PARTS), FEDAVG,
        run=COHORT) for joint in (False, True)},
    **{f"fedrep without a body, joint {joint}": Same(
        of(methods.fedrep, shared, head="all", joint=joint, batch_size=None, **PARTS),
        of(local_only, shared, **WHOLE), kept("params"), kept("params"), run=COHORT)
        for joint in (False, True)},
    "fedbabu is fedrep without steps of the head": Same(
        around(by_rows, of(methods.fedbabu, shared, head=HEAD, **SOME)),
        of(methods.fedrep, shared, head=HEAD, batch_size=2, **{**PARTS, "head_steps": 0}), run=COHORT),
    **{f"fedrecon without a head, {server!r}": Same(
        of(methods.fedrecon, shared, head="none", body_optimizer=SGD(0.05, 0.5), body_steps=2,
           server_optimizer=server, split=False, batch_size=2),
        around(lambda m, server=server: methods.server_optimized(m, server), FEDAVG), run=COHORT)
        for server in (SGD(1.0), SGD(0.7, 0.9), Adam(0.05))},
    "fedrecon's first round is fedrep's": Same(
        of(methods.fedrecon, shared, head=HEAD, head_optimizer=SGD(0.05), split=False, batch_size=2,
           body_optimizer=SGD(0.05), head_steps=2, body_steps=2),
        of(methods.fedrep, shared, head=HEAD, batch_size=2, **{**PARTS, "optimizer": SGD(0.05)}),
        run={"rounds": 1}),
    # ------------------------------------------------------------------ hierarchies
    **{f"fedmap, {name}": Same(make, mapped(Isotropic(0.7)), sent("gamma"), lambda f: {
        n: v for n, v in f.message["gamma"].items() if n.startswith("theta")})
       for name, make in (
            ("by gradients", mapped(Isotropic(0.7), server="gradient", server_optimizer=SGD(0.7))),
            ("by the prior's best", mapped(Isotropic(0.7), server=Isotropic(0.7).best)),
            ("a frozen variance", mapped(LearnedVariance(c=0.7), server_optimizer=SGD(0.0))))},
    **{f"pfedbred {strategy} without meta steps is pfedme": Same(
        of(pfedbred, units, strategy, gradient_step_size=0.0, memory_step_size=0.0,
           inner_start="global", **BRED),
        of(pfedme, units, **BRED), everything, everything, run=BREDS)
        for strategy in ("none", "lg", "meg", "mh", "mh24")},
    **{f"pfedbred {strategy} under a Gaussian Bregman prior": Same(
        of(pfedbred, gaussian, strategy, **BRED), of(pfedbred, units, strategy, **BRED),
        everything, everything, run=BREDS) for strategy in ("meg", "mh")},
    **{f"fedabml of points is pfedme, {steps} steps": Same(
        of(methods.fedabml, own_quadratics, guides.delta, kl_weight=4.0 * 2.0, optimizer=SGD(0.02),
           global_optimizer=SGD(0.03), inner_steps=4, unit="step", draws=1, steps=steps,
           batch_size=None),
        of(pfedme, own_quadratics, **PROX, inner_steps=4, steps=steps, batch_size=None),
        everything, everything, equal_rows) for steps in (1, 3)},
    "fedhb without its prior is fedabml's EM": Same(
        of(methods.fedhb, learned, **EM, prior_clients=0.0, prior_freedom=0.0, prior_spread=0.0),
        LEARNED_EM, atol=1e-9),
    "pfedhb without its hyper-prior is fedabml's EM": Same(
        of(methods.pfedhb, learned, **EM, mean_penalty=0.0, variance_penalty=0.0),
        around(by_rows, LEARNED_EM), atol=1e-9),
    # ------------------------------------------------------------------ posteriors
    "sfvi_avg of one client and one step is fedsvi": Same(
        of(methods.fedsvi, regression, merge="natural", global_optimizer=SGD(1e-3), **CONSTANT),
        of(methods.fedsvi, regression, optimizer=SGD(1e-3), **CONSTANT), sent("params"),
        strict_lower, (5,), {"rounds": 4, "seed": 2}, 1e-8),
    # where all clients take part memory changes what crosses, and not the sum
    **{f"qlsd without noise is gradient descent, memory {memory}": Same(
        of(methods.qlsd, common, levels=None, memory=memory, **CHAIN),
        of(methods.fedsvi, common, guides.delta, optimizer=SGD(0.01), **CONSTANT),
        other=point, run={"rounds": 6}) for memory in (0.0, 0.7)},
    "fald without noise and with one step is qlsd": Same(
        of(methods.fald, common, steps=1, **CHAIN),
        of(methods.qlsd, common, levels=None, memory=0.0, **CHAIN)),
    "pvi under Renyi's divergence of order 1": Same(
        of(methods.pvi, logistic, divergence="renyi", alpha=1.0), of(methods.pvi, logistic),
        sent("params"), sent("params"), (5, 3), {"rounds": 2}, 0.0),
    **{f"fedep of Gaussians is pvi, damping {damping}": Same(
        of(methods.fedep, line, damping=damping), of(methods.pvi, line, damping=damping),
        sent("params"), sent("params"), e1, {"rounds": 1 if damping else 3})
        for damping in (1.0, None)},
    # ------------------------------------------------------------------ wrappers
    "by_rows of a method by rows": Same(around(by_rows, FEDAVG), FEDAVG),
    "by_rows twice": Same(
        around(by_rows, around(by_rows, of(pfedme, units, **BRED))),
        around(by_rows, of(pfedme, units, **BRED)), atol=0.0),
    "robust that trims nothing": Same(
        around(lambda m: methods.robust(m, tolerated=0.0), FEDAVG), FEDAVG, data=EQUAL),
    **{f"batch_normed {name} without batch norm": Same(
        around(methods.batch_normed, make), make, read, read, atol=0.0)
       for name, make, read in (
            ("fedavg", FEDAVG, lambda f: f.message),
            ("ditto", of(methods.ditto, shared, **SOME), kept("params")))},
    "a server's step of 1": Same(
        around(lambda m: methods.server_optimized(m, SGD(1.0)), FEDAVG), FEDAVG),
    **{f"{name} around quantized": Same(around(wrap, QUANTIZED), QUANTIZED, atol=1e-12)
       for name, wrap in (
            ("server_optimized", lambda m: methods.server_optimized(m, SGD(1.0))),
            ("over_relaxed", lambda m: methods.over_relaxed(m, 1.0)),
            ("averaging_some", lambda m: methods.averaging_some(m, share=1.0)))},
    **{f"differentially_private {name} with hardly any noise": Same(
        around(lambda m: methods.differentially_private(
            m, clipping_norm=1e6, noise_multiplier=1e-30, secret=1), make),
        make, read, read, data, {"rounds": 3}, 1e-9)
       for name, make, read, data in (
            ("fedavg", FEDAVG, lambda f: f.message, EQUAL),
            ("ditto", of(methods.ditto, shared, **SOME), lambda f: f.message, EQUAL),
            ("fedsvi", of(methods.fedsvi, regression), sent("params"), EQUAL),
            ("pvi", PVI, sent("params"), e1),
            ("diagonal pvi", of(methods.pvi, line, factors="diagonal", draws=2, steps=1),
             sent("params"), e1))},
}
# fmt: on


@cache
def fitted(make: Make, data: Any, run: tuple[tuple[str, Any], ...]) -> hierfl.Fit:
    """Return a fit, which several pairs share."""
    return fit(make(), data() if callable(data) else federation(data), **dict(run))


@pytest.mark.slow(  # where another case takes the same lines
    *(f"apfl's common model, alpha {alpha}" for alpha in (0.0, 1.0)),
    "apfl, alpha 1",
    "fedpa's first rounds, batches of None",
    "fedrep without a head, joint True",
    "fedrep without a body, joint True",
    *(f"fedrecon without a head, {server!r}" for server in (SGD(1.0), SGD(0.7, 0.9))),
    *(f"fedmap restarted, {how}" for how in ("SGD", "no prior")),
    "fedmap, a frozen variance",
    *(f"pfedbred {strategy} without meta steps is pfedme" for strategy in ("lg", "mh")),
    "pfedbred meg under a Gaussian Bregman prior",
    "fedabml of points is pfedme, 1 steps",
    "qlsd without noise is gradient descent, memory 0.0",
    "fedep of Gaussians is pvi, damping 1.0",
    "batch_normed ditto without batch norm",
    *(f"differentially_private {name} with hardly any noise" for name in ("ditto", "pvi")),
    *(f"{name} around quantized" for name in ("over_relaxed", "averaging_some")),
    "by_rows twice",
    "pvi under Renyi's divergence of order 1",
    "pfedhb without its hyper-prior is fedabml's EM",
    "fedhb without its prior is fedabml's EM",
)
@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_other_method(name: str) -> None:
    pair = PAIRS[name]
    run = tuple(pair.run.items())
    one, two = (fitted(make, pair.data, run) for make in (pair.ours, pair.theirs))
    ours, theirs = named_leaves(dict(pair.mine(one))), named_leaves(dict(pair.other(two)))
    assert theirs and theirs.keys() <= ours.keys()
    for path, value in theirs.items():
        found, wanted = torch.broadcast_tensors(ours[path], value)
        assert torch.allclose(found, wanted, atol=pair.atol, rtol=0.0), path
