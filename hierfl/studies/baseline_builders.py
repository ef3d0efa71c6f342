"""Builders of `baseline_methods`: (network, step size, budget, **settings) -> method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.methods import (
    apfl,
    clustered_fl,
    ditto,
    fedamp,
    fedavg,
    fedbabu,
    fedbn,
    fedem,
    fedfomo,
    fedhb_mixture,
    fedpa,
    fedpac,
    fedrecon,
    fedrep,
    fine_tuned,
    heur_fedamp,
    ifca,
    knn_per,
    local_only,
    per_fedavg,
    pfedhn,
    scaffold,
)
from hierfl.models import HeadedNetwork, MemoryNetwork, batch_norm_network, network
from hierfl.models.likelihood import Likelihood
from hierfl.optimizers import SGD

Made = Callable[..., Method]  # (network, step size, budget, **settings) -> method
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

    `evaluations` are gradient evaluations of a round, or steps if `counts_steps`; `passes` come
    nearest. `rows` are a mini-batch's, `client_rows` a client's on average, `scale` the sd at which
    learned prior scales start. `tune_steps` 0: as many as a round has. `likelihood` None: classes.
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


def first_of(net: nn.Sequential) -> str:
    """Return the name of a network's first layer with weights."""
    return next(name for name, layer in net.named_children() if list(layer.parameters()))


def head_of(net: nn.Sequential) -> tuple[str]:
    """Return the prefix of the last layer's params."""
    return (f"theta.{last_of(net)}.",)


def shares(total: int, first_part: int, other: int) -> tuple[int, int]:
    """Split a number of steps in two by their proportion, with 1 or more for each."""
    first = min(max(1, round(total * first_part / (first_part + other))), max(1, total - 1))
    return first, max(1, total - first)


def nearest(total: int, evaluations: int) -> int:
    """Return how many steps of `each` evaluations come nearest to a total, 1 or more."""
    return max(1, round(total / evaluations))


def local(b: Budget, each: int = 1, **more: Any) -> dict[str, Any]:
    """Return most methods' options of descent, with `each` gradient evaluations a step."""
    return {"steps": b.steps(each), "unit": "step", "batch_size": b.rows, **more}


def tuning(method: Method, lr: float, b: Budget, *, own_steps: bool = True) -> Method:
    """Return a method with the budget's `tune_steps` of fine-tuning; `own_steps` as there."""
    steps = b.tune_steps or b.evaluations
    return fine_tuned(method, **local(b, optimizer=SGD(lr)) | {"steps": steps}, own_steps=own_steps)


def descending(
    method: Callable[..., Method],
    evaluations: int = 1,
    *,
    momentum: float = 0.0,
    more: Callable[[nn.Sequential, Budget], dict[str, Any]] = lambda net, b: {},
    model: Callable[..., Any] = network,
) -> Made:
    """Return the builder of a method that descends with SGD, `each` gradients a step."""

    def made(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
        options = local(b, evaluations, optimizer=SGD(lr, momentum=momentum)) | more(net, b)
        return method(model(net, likelihood=b.likelihood), **options | settings)

    return made


def with_batch_norm(net: nn.Sequential, likelihood: Likelihood | None) -> Any:
    """Return the network with batch normalization after each dense layer but the last."""
    layers: list[nn.Module] = []
    for layer in list(net)[:-1]:
        layers.append(layer)
        if isinstance(layer, nn.Linear):
            layers.append(nn.BatchNorm1d(layer.out_features))
    return batch_norm_network(nn.Sequential(*layers, net[-1]), likelihood=likelihood)


def with_memory(net: nn.Sequential, likelihood: Likelihood | None) -> MemoryNetwork:
    """Return the network whose features are what the last layer takes; of classes alone."""
    return MemoryNetwork(net, features=last_of(net))


a_local_only = descending(local_only)
a_fedavg = descending(fedavg)
a_fedprox = descending(fedavg, more=lambda net, b: {"prox": PROX})
a_scaffold = descending(scaffold)
a_ditto = descending(ditto, 2)  # half of the steps are the common model's
an_apfl = descending(apfl, 2)  # as Ditto's
# clients tune by as many steps as a round has
a_fedbabu = descending(
    fedbabu, momentum=0.9, more=lambda net, b: {"tune_steps": b.evaluations, "head": head_of(net)}
)
a_fedbn = descending(fedbn, model=with_batch_norm)
a_fedem = descending(fedem, 3, more=lambda net, b: {"components": 3})  # a step is one of all three
an_ifca = descending(ifca)
a_fedhb_mixture = descending(fedhb_mixture)
a_clustered_fl = descending(
    clustered_fl, momentum=0.9, more=lambda net, b: {"warmup_rounds": min(20, b.rounds // 2)}
)
a_fedamp = descending(fedamp, more=lambda net, b: {"sigma": float(b.clients)})
a_heur_fedamp = descending(heur_fedamp)
a_fedfomo = descending(fedfomo, more=lambda net, b: {"validation": HELD})  # rows of `held_out`
a_pfedhn = descending(pfedhn, momentum=0.9)
a_knn_per = descending(knn_per, model=with_memory)


def a_per_fedavg(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return first-order Per-FedAvg, of two gradients a step."""
    options: dict[str, Any] = {"inner_optimizer": SGD(lr), "optimizer": SGD(lr)}
    options |= {"steps": b.steps(2), "batch_size": b.rows}
    return per_fedavg(network(net, likelihood=b.likelihood), **options | settings)


def a_fedpa(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPA."""
    options: dict[str, Any] = {"epochs": b.passes, "batch_size": b.rows}
    options |= {"burn_in": min(1, b.passes - 1), "optimizer": SGD(lr, momentum=0.9)}
    return fedpa(network(net, likelihood=b.likelihood), **options | settings)


# -------------------------------------------------------------------------------- a body and a head
def in_two(b: Budget, head: int, body: int) -> dict[str, Any]:
    """Return the options of a round whose steps are shared by head and body in this proportion."""
    on_head, on_body = shares(b.evaluations, head, body)
    steps = {"head_steps": on_head, "body_steps": on_body}
    return {**steps, "unit": "step", "batch_size": b.rows}


def a_fedrep(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedRep, with ten steps on the head for each on the body."""
    options = in_two(b, 10, 1) | {"head": head_of(net), "optimizer": SGD(lr, momentum=0.5)}
    return fedrep(network(net, likelihood=b.likelihood), **options | settings)


def a_fedper(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPer; a client that joins later fits its head alone, by as many steps."""
    steps: dict[str, Any] = {
        "head_steps": b.evaluations,
        "body_steps": b.evaluations,
        "joint": True,
    }
    return a_fedrep(net, lr, b, **steps | settings)


def a_fedrecon(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedRecon; its body moves five times as fast as its head, as the authors' does."""
    options = in_two(b, 5, 1) | {"head": head_of(net)}
    options |= {"head_optimizer": SGD(lr), "body_optimizer": SGD(5.0 * lr)}
    return fedrecon(network(net, likelihood=b.likelihood), **options | settings)


def a_fedpac(net: nn.Sequential, lr: float, b: Budget, **settings: Any) -> Method:
    """Return FedPAC; its head moves ten times as fast as its body, as the authors' does."""
    options = in_two(b, 1, 5)
    options |= {"head_optimizer": SGD(lr, momentum=0.5), "optimizer": SGD(lr / 10.0, momentum=0.5)}
    return fedpac(HeadedNetwork(net, head=last_of(net)), **options | settings)
