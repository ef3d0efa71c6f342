"""What the methods of studies are made of: a client's budget, models of a network, options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from hierfl import models
from hierfl.core.arguments import expect
from hierfl.data.clients import ClientData
from hierfl.guides.mean_field import mean_field
from hierfl.models.learned_priors import InputConvex, Isotropic, LearnedPrior, LearnedVariance
from hierfl.models.likelihood import Likelihood
from hierfl.optimizers import SGD, Adam
from hierfl.program.sites import Model

Options = dict[str, Any]
HELD = "held"  # row field: above 0 at the training rows by which FedFomo weights models
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

    def steps(self, evaluations: int) -> int:
        """Return the steps of a round, each of so many gradient evaluations."""
        return self.evaluations if self.counts_steps else nearest(self.evaluations, evaluations)

    def pooled(self, lr: float) -> float:
        """Return a step size for a mean over rows as one for the sum over all clients' rows."""
        return lr / (self.client_rows * self.clients)


def nearest(total: int, evaluations: int) -> int:
    """Return how many steps of so many evaluations come nearest to a total, 1 or more."""
    return max(1, round(total / evaluations))


def last_of(net: nn.Sequential) -> str:
    """Return the name of a network's last layer."""
    return str(len(net) - 1)


def first_of(net: nn.Sequential) -> str:
    """Return the name of a network's first layer with weights."""
    return next(name for name, layer in net.named_children() if list(layer.parameters()))


def common(net: nn.Sequential, b: Budget) -> Model:
    """Return the network that all clients share."""
    return models.network(net, likelihood=b.likelihood)


def with_batch_norm(net: nn.Sequential, b: Budget) -> Model:
    """Return the network with batch normalization after each dense layer but the last."""
    layers: list[nn.Module] = []
    for layer in list(net)[:-1]:
        layers.append(layer)
        if isinstance(layer, nn.Linear):
            layers.append(nn.BatchNorm1d(layer.out_features))
    return models.network(nn.Sequential(*layers, net[-1]), likelihood=b.likelihood)


def with_memory(net: nn.Sequential, b: Budget) -> Model:
    """Return the network whose features are what the last layer takes; of classes alone."""
    return models.MemoryNetwork(net, features=last_of(net))


def with_head(net: nn.Sequential, b: Budget) -> Model:
    """Return the network whose head is its last layer; of classes alone."""
    return models.HeadedNetwork(net, head=last_of(net))


def about_a_mean(net: nn.Sequential, b: Budget) -> Model:
    """Return clients' networks about a common one, at a known scale of 1."""
    return models.bayesian_network(net, prior_scale=1.0, likelihood=b.likelihood)


def heads_about_a_mean(net: nn.Sequential, b: Budget, *, prior_scale: float = 0.1) -> Model:
    """Return a common body, and clients' heads about a common one."""
    head = (f"{last_of(net)}.",)
    return models.bayesian_network(
        net, local=head, prior_scale=prior_scale, likelihood=b.likelihood
    )


def heads_of_own_scale(net: nn.Sequential, b: Budget, *, scale: float = 0.0) -> Model:
    """Return a common body, and clients' heads about a common one, each at a scale of its own."""
    how: dict[str, Any] = {"prior_scale": "client", "scale_start": scale or b.scale}
    return models.bayesian_network(net, local=(f"{last_of(net)}.",), likelihood=b.likelihood, **how)


def hierarchy(net: nn.Sequential, b: Budget, *, scale: float = 0.0) -> Model:
    """Return the Bayesian network whose prior is learned, weight by weight; `scale` 0: the study's."""
    return models.bayesian_network(
        net, prior_scale="learned", scale_start=scale or b.scale, likelihood=b.likelihood
    )


def about_the_module(net: nn.Sequential, b: Budget, *, scale: float = 0.0) -> Model:
    """Return clients' networks about the network's own weights, which are known."""
    return models.bayesian_network(
        net, prior_loc="module", prior_scale=scale or b.scale, likelihood=b.likelihood
    )


def common_posterior(net: nn.Sequential, b: Budget, *, prior_scale: float = 0.3) -> Model:
    """Return the Bayesian network that all clients share."""
    prior = dist.Normal(0.0, prior_scale)
    return models.bayesian_network(net, local="none", global_prior=prior, likelihood=b.likelihood)


def process(net: nn.Sequential, b: Budget, *, memory: int = 100) -> Model:
    """Return a Gaussian process on the network's features, of `memory` rows of a client at most."""
    classes = net[-1].out_features if b.likelihood is None else None
    return models.GaussianProcessNetwork(net[:-1], classes=classes, memory=memory)  # type: ignore[arg-type]


def personal_heads(net: nn.Sequential, b: Budget, *, own_heads: bool = True) -> Model:
    """Return FedVI's model, whose `own_heads` read 26 of 128 features, as in the paper; else heads are common."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    return models.PersonalHeads(
        net[:-1],
        outputs=last.out_features,
        features=last.in_features,
        local_features=max(1, round(last.in_features * 26 / 128)),
        merge=torch.add if own_heads else common_alone,
    )


def common_alone(common: Tensor, own: Tensor) -> Tensor:
    """Merge a client's two heads by leaving its own out."""
    return common


def learned_prior(
    name: str, variance: float = Isotropic().variance, hidden: Sequence[int] = (8,)
) -> LearnedPrior:
    """Return FedMAP's "isotropic", "variance" or "convex" prior."""
    priors: dict[str, LearnedPrior] = {
        "isotropic": Isotropic(variance),
        "variance": LearnedVariance(),
        "convex": InputConvex(tuple(hidden)),
    }
    expect(prior=(name, priors))
    return priors[name]


def mapped(
    net: nn.Sequential,
    b: Budget,
    *,
    prior: str = "isotropic",
    variance: float = Isotropic().variance,
    first_variance: float = 0.0,
    hidden: Sequence[int] = (8,),
) -> Model:
    """Return clients' networks under a `learned_prior`; `first_variance` 0: also of the first layer."""
    chosen: Any = learned_prior(prior, variance, hidden)
    if first_variance:
        chosen = {f"{first_of(net)}.": Isotropic(first_variance), "": chosen}
    return models.learned_prior_network(net, prior=chosen, likelihood=b.likelihood)


def head_of(net: nn.Sequential) -> Options:
    """Return the option of a head, the last layer's params."""
    return {"head": (f"theta.{last_of(net)}.",)}


def in_two(b: Budget, head: int, body: int) -> Options:
    """Return the steps of a round on head and on body, in this proportion, 1 or more each."""
    total = b.evaluations
    on_head = min(max(1, round(total * head / (head + body))), max(1, total - 1))
    return {"head_steps": on_head, "body_steps": max(1, total - on_head)}


def fedper_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options by which a client that joins later fits its head alone, by as many steps."""
    steps = {"head_steps": b.evaluations, "body_steps": b.evaluations}
    return {**steps, "joint": True, **head_of(net)}


def fedrecon_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options of a body that moves five times as fast as its head, as the authors' does."""
    optimizers = {"head_optimizer": SGD(lr), "body_optimizer": SGD(5.0 * lr)}
    return in_two(b, 5, 1) | head_of(net) | optimizers


def fedpac_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options of a head that moves ten times as fast as its body, as the authors' does."""
    head, body = SGD(lr, momentum=0.5), SGD(lr / 10.0, momentum=0.5)
    return in_two(b, 1, 5) | {"head_optimizer": head, "optimizer": body}


def fedpop_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options of a chain and of a server, whose Adam has a tenth of the step size."""
    chain = {"step_size": lr / b.client_rows, "burn_in": b.evaluations // 2, "kept_draws": 20}
    return {**chain, "server_optimizer": Adam(0.1 * lr)}


def fedmap_options(
    net: nn.Sequential, lr: float, b: Budget, *, prior: str = "isotropic", server: str = "average"
) -> Options:
    """Return the server; "best" minimizes exactly."""
    if server != "best":
        return {"server": server}
    best = getattr(learned_prior(prior), "best", None)
    if best is None:
        raise ValueError(f"prior '{prior}' has no exact minimizer: leave out server = 'best'")
    return {"server": best}


def fedsvi_options(net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0) -> Options:
    """Return options by which all steps but the last one are of a client's own posterior."""
    guide = mean_field(init_scale=scale or b.scale)
    return {"guide": guide, "local_optimizer": Adam(lr), "local_steps": b.evaluations - 1}


def fedhb_options(net: nn.Sequential, lr: float, b: Budget, *, scale: float = 0.0) -> Options:
    """Return options of one draw, whose prior's spread over clients is the study's."""
    return {"draws": 1, "prior_spread": 3.0 * (scale or b.scale) ** 2}


def pfedvem_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options that split the steps among heads and body; without a body all are heads'."""
    base = b.evaluations // 2 if last_of(net) != first_of(net) else 0
    steps = {"head_steps": b.evaluations - base, "steps": base, "head_batch_size": b.rows}
    return {**steps, "base_optimizer": SGD(lr), "draws": 1}


def fola_options(net: nn.Sequential, lr: float, b: Budget) -> Options:
    """Return options by which the pass that squares gradients counts as its mini-batches."""
    passed = math.ceil(b.client_rows / b.rows)
    return {"fisher_rows": b.rows, "steps": max(1, b.evaluations - passed)}
