"""Builders of the hierarchical methods of `baseline_methods`: a prior, and clients' own weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from hierfl.guides.mean_field import mean_field
from hierfl.method import Method
from hierfl.methods import by_rows as weighted_by_rows
from hierfl.methods import (
    fald,
    fedabml,
    fedhb,
    fedivon,
    fedmap,
    fedpop,
    fedsvi,
    fedvi,
    fedwba,
    fola,
    pfedbayes,
    pfedbred,
    pfedgp,
    pfedhb,
    pfedme,
    pfedvem,
    qlsd,
)
from hierfl.methods.fedmap import Best
from hierfl.models import (
    GaussianProcessNetwork,
    PersonalHeads,
    bayesian_network,
    learned_prior_network,
)
from hierfl.models.learned_priors import InputConvex, Isotropic, LearnedPrior, LearnedVariance
from hierfl.optimizers import SGD, Adam
from hierfl.program.sites import Model
from hierfl.studies.baseline_builders import Budget, first_of, last_of, local

PARTICLES = 5  # of FedWBA, whose step takes the gradient of each


def a_fedpop(
    net: nn.Sequential, lr: float, b: Budget, *, prior_scale: float = 0.1, **settings: Any
) -> Method:
    """Return FedPop of a common body and heads about a common mean; its server's Adam has a tenth of lr."""
    hierarchy = bayesian_network(
        net, local=(f"{last_of(net)}.",), prior_scale=prior_scale, likelihood=b.likelihood
    )
    options: dict[str, Any] = {
        "step_size": lr / b.client_rows,
        "steps": b.evaluations,
        "burn_in": b.evaluations // 2,
    }
    options |= {"batch_size": b.rows, "kept_draws": 20, "server_optimizer": Adam(0.1 * lr)}
    return fedpop(hierarchy, **options | settings)


def a_pfedme(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedMe, with K = 5."""
    options: dict[str, Any] = {
        "optimizer": SGD(lr),
        "inner_steps": 5,
        "steps": b.steps(5),
        "batch_size": b.rows,
    }
    return pfedme(
        bayesian_network(net, prior_scale=1.0, likelihood=b.likelihood), **options | settings
    )


def a_pfedbred(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedBreD, mh unless the setting `strategy` says otherwise, with K = 5."""
    steps = b.steps(6)  # 5 of the client's model, and one that moves the mean
    options: dict[str, Any] = {
        "optimizer": SGD(lr),
        "inner_steps": 5,
        "steps": steps,
        "batch_size": b.rows,
        "strategy": "mh",
    }
    return pfedbred(
        bayesian_network(net, prior_scale=1.0, likelihood=b.likelihood), **options | settings
    )


def a_fedmap(
    net: nn.Sequential,
    lr: float,
    b: Budget,
    *,
    prior: str = "isotropic",
    variance: float = Isotropic().variance,
    first_variance: float = 0.0,
    hidden: Sequence[int] = (8,),
    **settings: Any,
) -> Method:
    """Return FedMAP with an "isotropic", "variance" or "convex" prior; server "best" minimizes exactly."""
    priors: dict[str, LearnedPrior] = {
        "isotropic": Isotropic(variance),
        "variance": LearnedVariance(),
        "convex": InputConvex(tuple(hidden)),
    }
    if prior not in priors:
        raise ValueError(f"prior is {prior!r}; it must be one of {', '.join(priors)}")
    chosen: LearnedPrior | dict[str, LearnedPrior] = priors[prior]
    if first_variance:
        chosen = {f"{first_of(net)}.": Isotropic(first_variance), "": priors[prior]}
    if settings.get("server") == "best":
        settings["server"] = _best(prior, priors[prior])
    model = learned_prior_network(net, prior=chosen, likelihood=b.likelihood)
    return fedmap(model, **local(b, optimizer=Adam(lr)) | settings)


def _best(name: str, prior: LearnedPrior) -> Best:
    """Return the exact minimizer of a prior, as FedMAP's server takes it."""
    best: Best | None = getattr(prior, "best", None)
    if best is None:
        raise ValueError(f"prior '{name}' has no exact minimizer: leave out server = 'best'")
    return best


def hierarchy(net: nn.Sequential, b: Budget, scale: float = 0.0) -> Model:
    """Return the Bayesian network whose prior is learned, weight by weight; `scale` 0: the study's."""
    return bayesian_network(
        net, prior_scale="learned", scale_start=scale or b.scale, likelihood=b.likelihood
    )


def a_pfedbayes(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return pFedBayes, with K = 5."""
    options: dict[str, Any] = {"inner_steps": 5, "batch_size": b.rows}
    options |= {"optimizer": Adam(lr), "global_optimizer": Adam(lr)}
    options |= {"steps": b.steps(5)}
    return pfedbayes(hierarchy(net, b, scale), **options | settings)


def a_fedabml(
    net: nn.Sequential,
    lr: float,
    b: Budget,
    *,
    by_rows: bool = False,
    scale: float = 0.0,
    **settings: Any,
) -> Method:
    """Return FedABML with K = 5, one draw, and a validated KL weight; `by_rows` weights clients."""
    options = local(b, 5, kl_weight=0.05, optimizer=SGD(lr), inner_steps=5, draws=1)
    made = fedabml(hierarchy(net, b, scale), **options | settings)
    return weighted_by_rows(made) if by_rows else made


def a_fedvi(
    net: nn.Sequential, lr: float, b: Budget, *, own_heads: bool = True, **settings: Any
) -> Method:
    """Return FedVI, whose `own_heads` read 26 of 128 features, as in the paper; else heads are common."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    heads = PersonalHeads(
        net[:-1],
        outputs=last.out_features,
        features=last.in_features,
        local_features=max(1, round(last.in_features * 26 / 128)),
        merge=torch.add if own_heads else common_alone,
    )
    return fedvi(heads, **local(b, optimizer=SGD(lr)) | settings)


def common_alone(common: Tensor, own: Tensor) -> Tensor:
    """Merge a client's two heads by leaving its own out."""
    return common


def a_fedsvi(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return FedSVI by mean field; all steps but the last one are of a client's own posterior."""
    options: dict[str, Any] = {
        "optimizer": Adam(lr),
        "local_optimizer": Adam(lr),
        "batch_size": b.rows,
    }
    options |= {"local_steps": b.evaluations - 1}
    return fedsvi(
        hierarchy(net, b, scale), mean_field(init_scale=scale or b.scale), **options | settings
    )


def a_common(net: nn.Sequential, b: Budget, prior_scale: float) -> Model:
    """Return the Bayesian network that all clients share."""
    prior = dist.Normal(0.0, prior_scale)
    return bayesian_network(net, local="none", global_prior=prior, likelihood=b.likelihood)


def a_fola(
    net: nn.Sequential, lr: float, b: Budget, *, prior_scale: float = 0.3, **settings: Any
) -> Method:
    """Return FOLA, whose pass that squares gradients counts as its mini-batches."""
    passed = math.ceil(b.client_rows / b.rows)
    options = local(b, optimizer=SGD(lr), fisher_rows=b.rows)
    options["steps"] = max(1, b.evaluations - passed)
    return fola(a_common(net, b, prior_scale), **options | settings)


def a_fedivon(
    net: nn.Sequential, lr: float, b: Budget, *, prior_scale: float = 0.3, **settings: Any
) -> Method:
    """Return FedIvon, of one draw."""
    return fedivon(a_common(net, b, prior_scale), **local(b, lr=lr) | settings)


def a_fedhb(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return FedHB, of one draw, whose prior's spread over clients is the study's."""
    options = local(b, optimizer=SGD(lr), draws=1)
    options["prior_spread"] = 3.0 * (scale or b.scale) ** 2
    return fedhb(hierarchy(net, b, scale), **options | settings)


def a_pfedvem(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return pFedVEM of a common body and heads, half of the steps each; without a body all are heads'."""
    model = bayesian_network(
        net,
        local=(f"{last_of(net)}.",),
        prior_scale="client",
        scale_start=scale or b.scale,
        likelihood=b.likelihood,
    )
    base = b.evaluations // 2 if last_of(net) != first_of(net) else 0
    options: dict[str, Any] = {"optimizer": SGD(lr), "base_optimizer": SGD(lr), "draws": 1}
    options |= {"head_steps": b.evaluations - base, "steps": base}
    options |= {"head_batch_size": b.rows, "batch_size": b.rows}
    return pfedvem(model, **options | settings)


def a_fedwba(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return FedWBA of five particles, drawn about the network's weights with the study's scale."""
    options = local(b, PARTICLES, optimizer=Adam(lr), particles=PARTICLES)
    model = bayesian_network(
        net, prior_loc="module", prior_scale=scale or b.scale, likelihood=b.likelihood
    )
    return fedwba(model, **options | settings)


def a_pfedgp(
    net: nn.Sequential, lr: float, b: Budget, *, memory: int = 100, **settings: Any
) -> Method:
    """Return pFedGP on the network's features, whose clients keep `memory` rows at most."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    classes = last.out_features if b.likelihood is None else None
    model = GaussianProcessNetwork(net[:-1], classes=classes, memory=memory)
    return pfedgp(model, **local(b, optimizer=SGD(lr, momentum=0.9)) | settings)


def a_qlsd(
    net: nn.Sequential, lr: float, b: Budget, *, prior_scale: float = 0.3, **settings: Any
) -> Method:
    """Return QLSD, one gradient of all rows a round, whose step size is lr over the pooled rows."""
    step_size = lr / (b.client_rows * b.clients)
    options: dict[str, Any] = {"step_size": step_size, "draws": 20}
    return qlsd(a_common(net, b, prior_scale), **options | settings)


def a_fald(
    net: nn.Sequential, lr: float, b: Budget, *, prior_scale: float = 0.3, **settings: Any
) -> Method:
    """Return FALD, whose step size is lr over the pooled rows."""
    step_size = lr / (b.client_rows * b.clients)
    options: dict[str, Any] = {"step_size": step_size, "steps": b.steps(1), "batch_size": b.rows}
    return fald(a_common(net, b, prior_scale), **options | {"draws": 20} | settings)


def a_pfedhb(
    net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0, **settings: Any
) -> Method:
    """Return pFedHB, of one draw."""
    return pfedhb(hierarchy(net, b, scale), **local(b, optimizer=Adam(lr), draws=1) | settings)
