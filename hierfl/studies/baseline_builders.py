"""Builders of the methods of `baseline_methods` that take more than a line.

Each is (network, step size, budget, **settings) -> method. Settings are options of the method by name; they stand
in the place of what the builder would give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hierfl.data.clients import ClientData
from hierfl.guides.mean_field import mean_field
from hierfl.method import Method
from hierfl.methods import (
    apfl,
    clustered_fl,
    ditto,
    fedabml,
    fedamp,
    fedavg,
    fedbabu,
    fedbn,
    fedem,
    fedfomo,
    fedmap,
    fedpa,
    fedpac,
    fedpop,
    fedrecon,
    fedrep,
    fedsvi,
    fedvi,
    fine_tuned,
    heur_fedamp,
    ifca,
    individual,
    knn_per,
    per_fedavg,
    pfedbayes,
    pfedbred,
    pfedhn,
    pfedme,
    scaffold,
)
from hierfl.models import (
    HeadedNetwork,
    MemoryNetwork,
    PersonalHeads,
    batch_norm_network,
    bayesian_network,
    map_network,
    network,
)
from hierfl.models.likelihood import Likelihood
from hierfl.models.map_priors import Isotropic
from hierfl.optimisers import SGD, Adam
from hierfl.program.sites import Model

PROX = 0.5  # FedProx' weight that FedABML's paper chose for its MNIST sets
HELD = "held"  # row field: above 0 at the training rows by which FedFomo weighs models
EVERY = 5  # of these rows FedFomo holds out one in so many, as by its authors


def held_out(train: ClientData) -> ClientData:
    """Return training rows of which every fifth is marked for FedFomo."""
    marks = torch.arange(train.num_rows) % EVERY == 0
    return replace(train, fields={**train.fields, HELD: marks.to(torch.get_default_dtype())})


@dataclass(frozen=True)
class Budget:
    """What a client may spend, and what the methods of posteriors start from.

    Args:
        evaluations: gradient evaluations of a round.
        rows: of a mini-batch.
        rounds: in all.
        clients: how many there are.
        client_rows: a client's rows, on average.
        passes: over a client's rows that come nearest to `evaluations`, for methods that count in these.
        scale: standard deviation at which learned prior scales start.
        tune_steps: steps of "+FT"; 0: as many as a round has.
        counts_steps: `evaluations` are steps, whatever a step takes.
        likelihood: of the labels; None: classes.
    """

    evaluations: int
    rows: int
    rounds: int
    clients: int
    client_rows: int
    passes: int
    scale: float
    tune_steps: int = 0
    counts_steps: bool = False
    likelihood: Likelihood | None = None

    def steps(self, each: int) -> int:
        """Return the steps of a round, each of so many gradient evaluations."""
        return self.evaluations if self.counts_steps else nearest(self.evaluations, each)


def last_of(net: nn.Sequential) -> str:
    """Return the name of a network's last layer."""
    return str(len(net) - 1)


def head_of(net: nn.Sequential) -> tuple[str]:
    """Return the prefix of the last layer's params."""
    return (f"theta.{last_of(net)}.",)


def shares(total: int, one: int, other: int) -> tuple[int, int]:
    """Split a number of steps in two by their proportion, with 1 or more for each."""
    first = min(max(1, round(total * one / (one + other))), max(1, total - 1))
    return first, max(1, total - first)


def nearest(total: int, each: int) -> int:
    """Return how many steps of `each` evaluations come nearest to a total, 1 or more."""
    return max(1, round(total / each))


def local(b: Budget, each: int = 1, **more: Any) -> dict[str, Any]:
    """Return the options by which most methods say how a client descends.

    Args:
        b: whose evaluations are taken.
        each: evaluations of a step.
        **more: other options.
    """
    return {"steps": b.steps(each), "unit": "step", "batch_size": b.rows, **more}


def an_individual(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return a model for each client by itself."""
    return individual(
        network(net, likelihood=b.likelihood), **local(b, optimiser=SGD(lr)) | settings
    )


def a_fedavg(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedAvg."""
    return fedavg(network(net, likelihood=b.likelihood), **local(b, optimiser=SGD(lr)) | settings)


def a_fedprox(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedProx."""
    return a_fedavg(net, lr, b, **{"prox": PROX} | settings)


def a_scaffold(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return SCAFFOLD."""
    return scaffold(network(net, likelihood=b.likelihood), **local(b, lr=lr) | settings)


def tuning(method: Method, lr: float, b: Budget, *, own_steps: bool = True) -> Method:
    """Return a method whose clients tune by the budget's `tune_steps`; `own_steps` as in `fine_tuned`."""
    steps = b.tune_steps or b.evaluations
    return fine_tuned(method, **local(b, optimiser=SGD(lr)) | {"steps": steps}, own_steps=own_steps)


def a_per_fedavg(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return first-order Per-FedAvg, of two gradients a step."""
    given: dict[str, Any] = {
        "inner_lr": lr,
        "lr": lr,
        "steps": b.steps(2),
        "batch_size": b.rows,
    }
    return per_fedavg(network(net, likelihood=b.likelihood), **given | settings)


def a_ditto(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return Ditto; half of the steps are the common model's."""
    return ditto(network(net, likelihood=b.likelihood), **local(b, 2, optimiser=SGD(lr)) | settings)


def an_apfl(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return APFL; half of the steps are the common model's."""
    return apfl(network(net, likelihood=b.likelihood), **local(b, 2, optimiser=SGD(lr)) | settings)


def a_fedrep(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedRep, with ten steps on the head for each on the body."""
    on_head, on_body = shares(b.evaluations, 10, 1)
    given: dict[str, Any] = {
        "head_steps": on_head,
        "body_steps": on_body,
        "unit": "step",
        "batch_size": b.rows,
    }
    given |= {"head": head_of(net), "optimiser": SGD(lr, momentum=0.5)}
    return fedrep(network(net, likelihood=b.likelihood), **given | settings)


def a_fedper(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPer; a client that joins later fits its head alone, by as many steps."""
    each: dict[str, Any] = {"head_steps": b.evaluations, "body_steps": b.evaluations, "joint": True}
    return a_fedrep(net, lr, b, **each | settings)


def a_fedbabu(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedBABU whose clients tune by as many steps as a round has."""
    given = local(b, optimiser=SGD(lr, momentum=0.9), tune_steps=b.evaluations, head=head_of(net))
    return fedbabu(network(net, likelihood=b.likelihood), **given | settings)


def a_fedrecon(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedRecon; its body moves five times as fast as its head, as the authors' does."""
    on_head, on_body = shares(b.evaluations, 5, 1)
    given: dict[str, Any] = {
        "head_steps": on_head,
        "body_steps": on_body,
        "unit": "step",
        "batch_size": b.rows,
    }
    given |= {"head_optimiser": SGD(lr), "body_optimiser": SGD(5.0 * lr), "head": head_of(net)}
    return fedrecon(network(net, likelihood=b.likelihood), **given | settings)


def a_fedbn(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedBN of the network with batch normalisation after each dense layer but the last."""
    layers: list[nn.Module] = []
    for layer in list(net)[:-1]:
        layers.append(layer)
        if isinstance(layer, nn.Linear):
            layers.append(nn.BatchNorm1d(layer.out_features))
    model = batch_norm_network(nn.Sequential(*layers, net[-1]), likelihood=b.likelihood)
    return fedbn(model, **local(b, optimiser=SGD(lr)) | settings)


def a_fedpa(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPA."""
    optimiser = SGD(lr, momentum=0.9)
    given: dict[str, Any] = {"epochs": b.passes, "batch_size": b.rows, "optimiser": optimiser}
    return fedpa(network(net, likelihood=b.likelihood), **given | settings)


def a_fedpop(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPop of a common body and heads about a common mean.

    The chain's step size is in units of a sum over rows. The server's Adam takes a tenth of the step size, as it
    moves once a round.
    """
    hierarchy = bayesian_network(
        net, local=(f"{last_of(net)}.",), prior_scale=0.1, likelihood=b.likelihood
    )
    given: dict[str, Any] = {
        "lr": lr / b.client_rows,
        "steps": b.evaluations,
        "burn_in": b.evaluations // 2,
    }
    given |= {"batch_size": b.rows, "kept": 20, "server_optimiser": Adam(0.1 * lr)}
    return fedpop(hierarchy, **given | settings)


def a_fedem(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedEM of three models; each step is one of all three."""
    return fedem(
        network(net, likelihood=b.likelihood),
        **local(b, 3, components=3, optimiser=SGD(lr)) | settings,
    )


def an_ifca(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return IFCA."""
    return ifca(network(net, likelihood=b.likelihood), **local(b, optimiser=SGD(lr)) | settings)


def a_clustered_fl(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return clustered federated learning."""
    wait, optimiser = min(20, b.rounds // 2), SGD(lr, momentum=0.9)
    return clustered_fl(
        network(net, likelihood=b.likelihood), **local(b, optimiser=optimiser, wait=wait) | settings
    )


def a_fedamp(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedAMP."""
    given = local(b, optimiser=SGD(lr), sigma=float(b.clients))
    return fedamp(network(net, likelihood=b.likelihood), **given | settings)


def a_heur_fedamp(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return HeurFedAMP."""
    return heur_fedamp(
        network(net, likelihood=b.likelihood), **local(b, optimiser=SGD(lr)) | settings
    )


def a_fedfomo(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedFomo; the rows of `held_out` weigh models."""
    return fedfomo(
        network(net, likelihood=b.likelihood),
        **local(b, optimiser=SGD(lr), validation=HELD) | settings,
    )


def a_pfedhn(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedHN."""
    return pfedhn(
        network(net, likelihood=b.likelihood),
        **local(b, optimiser=SGD(lr, momentum=0.9)) | settings,
    )


def a_fedpac(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPAC; its head moves ten times as fast as its body, as the authors' does."""
    on_head, on_body = shares(b.evaluations, 1, 5)
    given: dict[str, Any] = {
        "head_steps": on_head,
        "body_steps": on_body,
        "unit": "step",
        "batch_size": b.rows,
    }
    given |= {"head_optimiser": SGD(lr, momentum=0.5), "optimiser": SGD(lr / 10.0, momentum=0.5)}
    return fedpac(HeadedNetwork(net, head=last_of(net)), **given | settings)


def a_knn_per(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return kNN-Per; its features are what the last layer takes."""
    model = MemoryNetwork(net, features=last_of(net))
    return knn_per(model, **local(b, optimiser=SGD(lr)) | settings)


def a_pfedme(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedMe, with K = 5."""
    given: dict[str, Any] = {
        "lr": lr,
        "prox_steps": 5,
        "steps": b.steps(5),
        "batch_size": b.rows,
    }
    return pfedme(
        bayesian_network(net, prior_scale=1.0, likelihood=b.likelihood), **given | settings
    )


def a_pfedbred(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedBreD, mh unless the setting `strategy` says otherwise, with K = 5."""
    steps = b.steps(6)  # 5 of the client's model, and one that moves the mean
    given: dict[str, Any] = {
        "lr": lr,
        "prox_steps": 5,
        "steps": steps,
        "batch_size": b.rows,
        "strategy": "mh",
    }
    return pfedbred(
        bayesian_network(net, prior_scale=1.0, likelihood=b.likelihood), **given | settings
    )


def a_fedmap(
    net: nn.Sequential,
    lr: float,
    b: Budget,
    *,
    variance: float = Isotropic().variance,
    **settings: Any,
) -> Method:
    """Return FedMAP, with one prior variance for all weights."""
    model = map_network(net, prior=Isotropic(variance), likelihood=b.likelihood)
    return fedmap(model, **local(b, optimiser=Adam(lr)) | settings)


def hierarchy(net: nn.Sequential, b: Budget) -> Model:
    """Return the Bayesian network whose prior's mean and scale are learned, weight by weight."""
    return bayesian_network(
        net, prior_scale="learned", scale_start=b.scale, likelihood=b.likelihood
    )


def a_pfedbayes(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return pFedBayes, with K = 5."""
    given: dict[str, Any] = {"lr": lr, "eta": lr, "inner_steps": 5, "batch_size": b.rows}
    given |= {"steps": b.steps(5)}
    return pfedbayes(hierarchy(net, b), **given | settings)


def a_fedabml(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedABML, with K = 5, one draw, and the weight of the KL that `ood_entropy` chose on validation rows."""
    given = local(b, 5, lam=0.05, lr=lr, inner_steps=5, draws=1)
    return fedabml(hierarchy(net, b), **given | settings)


def a_fedvi(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedVI; a client's own head reads as large a share of the features as the paper's, 26 of 128."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    heads = PersonalHeads(
        net[:-1],
        outputs=last.out_features,
        features=last.in_features,
        local_features=max(1, round(last.in_features * 26 / 128)),
    )
    return fedvi(heads, **local(b, optimiser=SGD(lr)) | settings)


def a_fedsvi(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedSVI by mean field; all steps but the last one are of a client's own posterior."""
    given: dict[str, Any] = {
        "optimiser": Adam(lr),
        "local_optimiser": Adam(lr),
        "batch_size": b.rows,
    }
    given |= {"local_steps": b.evaluations - 1}
    return fedsvi(hierarchy(net, b), mean_field(init_scale=b.scale), **given | settings)
