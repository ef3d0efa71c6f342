"""Builders of the methods of `baseline_methods` that take more than a line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypedDict

import torch
from torch import nn

from hierfl.data.clients import ClientData
from hierfl.guides.mean_field import mean_field
from hierfl.method import Method
from hierfl.methods import (
    clustered_fl,
    ditto,
    fedabml,
    fedavg,
    fedbabu,
    fedbn,
    fedpa,
    fedpac,
    fedpop,
    fedrecon,
    fedrep,
    fedsvi,
    fedvi,
    fine_tuned,
    knn_per,
    per_fedavg,
    pfedbayes,
    pfedbred,
    pfedme,
    scaffold,
)
from hierfl.models import (
    HeadedNetwork,
    MemoryNetwork,
    PersonalHeads,
    batch_norm_network,
    bayesian_network,
    network,
)
from hierfl.optimisers import SGD, Adam
from hierfl.program.sites import Model

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
    """

    evaluations: int
    rows: int
    rounds: int
    clients: int
    client_rows: int
    passes: int
    scale: float


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


class Local(TypedDict):
    """Options by which most methods say how a client descends."""

    steps: int
    unit: Literal["step"]
    batch_size: int


def nearest(total: int, each: int) -> int:
    """Return how many steps of `each` evaluations come nearest to a total, 1 or more."""
    return max(1, round(total / each))


def local(b: Budget, each: int = 1) -> Local:
    """Return a round's steps, of which each takes some evaluations."""
    return {"steps": nearest(b.evaluations, each), "unit": "step", "batch_size": b.rows}


def a_fedavg(net: nn.Sequential, lr: float, b: Budget, *, prox: float = 0.0) -> Method:
    """Return FedAvg, or FedProx."""
    return fedavg(network(net), optimiser=SGD(lr), prox=prox, **local(b))


def a_scaffold(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return SCAFFOLD."""
    return scaffold(network(net), lr=lr, **local(b))


def tuning(method: Method, lr: float, b: Budget) -> Method:
    """Return a method whose clients tune by as many steps as a round has."""
    return fine_tuned(method, optimiser=SGD(lr), **local(b))


def a_per_fedavg(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return first-order Per-FedAvg, of two gradients a step."""
    steps = nearest(b.evaluations, 2)
    return per_fedavg(network(net), inner_lr=lr, lr=lr, steps=steps, batch_size=b.rows)


def a_ditto(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return Ditto; half of the steps are the common model's."""
    return ditto(network(net), optimiser=SGD(lr), **local(b, 2))


def a_fedrep(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedRep, with ten steps on the head for each on the body."""
    on_head, on_body = shares(b.evaluations, 10, 1)
    return fedrep(
        network(net),
        head=head_of(net),
        optimiser=SGD(lr, momentum=0.5),
        head_steps=on_head,
        body_steps=on_body,
        unit="step",
        batch_size=b.rows,
    )


def a_fedper(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedPer; a client that joins later fits its head alone, by as many steps."""
    return fedrep(
        network(net),
        head=head_of(net),
        optimiser=SGD(lr, momentum=0.5),
        head_steps=b.evaluations,
        body_steps=b.evaluations,
        unit="step",
        batch_size=b.rows,
        joint=True,
    )


def a_fedbabu(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedBABU whose clients tune by as many steps as a round has."""
    optimiser = SGD(lr, momentum=0.9)
    return fedbabu(
        network(net),
        head=head_of(net),
        optimiser=optimiser,
        tune_steps=b.evaluations,
        **local(b),
    )


def a_fedrecon(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedRecon; its body moves five times as fast as its head, as the authors' does."""
    on_head, on_body = shares(b.evaluations, 5, 1)
    return fedrecon(
        network(net),
        head=head_of(net),
        head_optimiser=SGD(lr),
        body_optimiser=SGD(5.0 * lr),
        head_steps=on_head,
        body_steps=on_body,
        unit="step",
        batch_size=b.rows,
    )


def a_fedbn(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedBN of the network with batch normalisation after each dense layer but the last."""
    layers: list[nn.Module] = []
    for layer in list(net)[:-1]:
        layers.append(layer)
        if isinstance(layer, nn.Linear):
            layers.append(nn.BatchNorm1d(layer.out_features))
    model = batch_norm_network(nn.Sequential(*layers, net[-1]))
    return fedbn(model, optimiser=SGD(lr), **local(b))


def a_fedpa(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedPA."""
    optimiser = SGD(lr, momentum=0.9)
    return fedpa(network(net), epochs=b.passes, batch_size=b.rows, optimiser=optimiser)


def a_fedpop(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedPop of a common body and heads about a common mean.

    The chain's step size is in units of a sum over rows. The server's Adam takes a tenth of the step size, as it
    moves once a round.
    """
    hierarchy = bayesian_network(net, local=(f"{last_of(net)}.",), prior_scale=0.1)
    return fedpop(
        hierarchy,
        lr=lr / b.client_rows,
        steps=b.evaluations,
        burn_in=b.evaluations // 2,
        batch_size=b.rows,
        kept=20,
        server_optimiser=Adam(0.1 * lr),
    )


def a_clustered_fl(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return clustered federated learning."""
    wait, optimiser = min(20, b.rounds // 2), SGD(lr, momentum=0.9)
    return clustered_fl(network(net), optimiser=optimiser, wait=wait, **local(b))


def a_fedpac(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedPAC; its head moves ten times as fast as its body, as the authors' does."""
    on_head, on_body = shares(b.evaluations, 1, 5)
    return fedpac(
        HeadedNetwork(net, head=last_of(net)),
        head_optimiser=SGD(lr, momentum=0.5),
        optimiser=SGD(lr / 10.0, momentum=0.5),
        head_steps=on_head,
        body_steps=on_body,
        unit="step",
        batch_size=b.rows,
    )


def a_knn_per(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return kNN-Per; its features are what the last layer takes."""
    return knn_per(MemoryNetwork(net, features=last_of(net)), optimiser=SGD(lr), **local(b))


def a_pfedme(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return pFedMe, with K = 5."""
    hierarchy = bayesian_network(net, prior_scale=1.0)
    steps = nearest(b.evaluations, 5)
    return pfedme(hierarchy, lr=lr, prox_steps=5, steps=steps, batch_size=b.rows)


def a_pfedbred(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return pFedBreD, mh, with K = 5."""
    hierarchy = bayesian_network(net, prior_scale=1.0)
    steps = nearest(b.evaluations, 6)  # 5 of the client's model, and one that moves the mean
    return pfedbred(hierarchy, "mh", lr=lr, prox_steps=5, steps=steps, batch_size=b.rows)


def hierarchy(net: nn.Sequential, b: Budget) -> Model:
    """Return the Bayesian network whose prior's mean and scale are learned, weight by weight."""
    return bayesian_network(net, prior_scale="learned", scale_start=b.scale)


def a_pfedbayes(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return pFedBayes, with K = 5."""
    steps = nearest(b.evaluations, 5)
    return pfedbayes(
        hierarchy(net, b), lr=lr, eta=lr, inner_steps=5, steps=steps, batch_size=b.rows
    )


def a_fedabml(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedABML, with K = 5, one draw, and the weight of the KL that `ood_entropy` chose on validation rows."""
    return fedabml(hierarchy(net, b), lam=0.05, lr=lr, inner_steps=5, draws=1, **local(b, 5))


def a_fedvi(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedVI; a client's own head reads as large a share of the features as the paper's, 26 of 128."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    heads = PersonalHeads(
        net[:-1],
        outputs=last.out_features,
        features=last.in_features,
        local_features=max(1, round(last.in_features * 26 / 128)),
    )
    return fedvi(heads, optimiser=SGD(lr), **local(b))


def a_fedsvi(net: nn.Sequential, lr: float, b: Budget) -> Method:
    """Return FedSVI by mean field; all steps but the last one are of a client's own posterior."""
    return fedsvi(
        hierarchy(net, b),
        mean_field(init_scale=b.scale),
        optimiser=Adam(lr),
        local_optimiser=Adam(lr),
        local_steps=b.evaluations - 1,
        batch_size=b.rows,
    )
