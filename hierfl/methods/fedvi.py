"""FedVI: a network constructs each client's head from its unlabeled rows; clients are stateless.

    client:  theta_k <- theta;  every mini-batch is split in halves, a support and a query set:
                 q(beta) = P(features of the support),  beta ~ q,
                 theta_k <- theta_k - lr grad[ query nll(theta_k, beta) + tau KL(q || prior) + ... ]
             returns theta_k - theta, weighted by the number of query rows
    server:  theta <- theta + SGD with momentum along the weighted mean

A new client needs rows only, no labels. Source: Vedadi et al. 2023, arXiv:2305.13672, Algorithm 1
and Section 5, Eq. (8) with the nll as a mean over rows (the paper's tau of 1e-9 then hardly
matters, as it does there).
Differences: no dropout; the halves are every other row of a shuffled mini-batch of any size.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, scaled, sub
from hierfl.data.batch import ClientBatch
from hierfl.guides.amortized import constructed
from hierfl.method import Client, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import expect_model, stepping_server
from hierfl.models.personal_heads import PersonalHeads
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program
from hierfl.program.traces import Terms


class FedVIWork(NamedTuple):
    """The client's copy of the params; the rows queried and the sum of their nll, (); the last KL, ()."""

    at: Stepped
    queried: Tensor
    loss: Tensor
    kl: Tensor


@About(
    infers="each client's head, computed by a network from its unlabeled rows",
    source="Vedadi et al. 2023, arXiv:2305.13672",
    common="params, and a network that makes heads",
    own="a head",
    guide="amortized, from unlabeled rows",
    new="a head from its rows, without labels",
    down="embedding, common head and the network that makes heads",
    up="`move`: how far it moved all of them; `loss`; `kl`",
)
def fedvi(
    model: PersonalHeads,
    *,
    kl_weight: float = 1e-9,
    prior_weight: float = 0.0,
    loss: Literal["mean", "sum"] = "mean",
    optimizer: Optimizer = SGD(0.02),  # noqa: B008 (frozen)
    server_optimizer: Optimizer = SGD(3.0, momentum=0.9),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 256,
    hidden: int = 256,
) -> Method:
    """Return FedVI of an embedding with a common and a personal head.

    Args:
        model: `hierfl.models.PersonalHeads(embedding, outputs=...)`.
        kl_weight: tau, of the KL of a client's personal head. Defaults of both weights, step sizes,
            batch_size and hidden: the paper's for FEMNIST (for CIFAR-100: tau 1e-3 and lr 0.03).
        prior_weight: gamma, of -log prior of the global params (`model.global_scale`), 1/N of it at
            each client; 0: no prior.
        loss: the nll as the mean over the query rows, or as their "sum": with both weights 1 that
            is the negative ELBO.
        optimizer: of the client, restarted in each round.
        server_optimizer: of the server, on minus the mean of the updates.
        steps: passes over the rows of a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch, both halves together; None: all.
        hidden: width of the posterior constructor.

    Raises:
        TypeError: the model is not a `hierfl.models.PersonalHeads`.
        ValueError: `kl_weight` or `prior_weight` is negative.
    """
    expect(kl_weight=(kl_weight, "[0, inf)"), prior_weight=(prior_weight, "[0, inf)"))
    expect_model(model, PersonalHeads, "fedvi", "outputs=...")

    def client(program: Program) -> Client:
        def objective(
            theta: Params, support: ClientBatch, query: ClientBatch
        ) -> tuple[Tensor, Terms]:
            terms = program.terms(theta, query, support=support)
            nll = terms.nll.sum() / (queried(query).clamp(min=1.0) if loss == "mean" else 1.0)
            total = nll + kl_weight * terms.local_kl.sum()
            if prior_weight:
                total = total + prior_weight * program.share * terms.global_kl
            return total, terms

        def move(work: FedVIWork, message: Params, batch: ClientBatch) -> FedVIWork:
            support, query = every_other(batch)
            gradient, (_, terms) = grad_and_value(objective, has_aux=True)(
                work.at.params, support, query
            )
            return FedVIWork(
                step(optimizer, gradient, work.at),
                work.queried + queried(query),
                work.loss + terms.nll.sum(),
                terms.local_kl.sum(),
            )

        def start(message: Params, own: Tree) -> FedVIWork:
            none = torch.zeros(())
            return FedVIWork(Stepped(message, optimizer.init(message)), none, none, none)

        def finish(work: FedVIWork, message: Params, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            n = work.queried
            up: Up = {
                "move": Share(sub(work.at.params, message), n),
                "loss": Share(work.loss / n.clamp(min=1.0), n),
                "kl": Share(work.kl),
            }
            return up, own

        return Client({}, start, (Phase(move, steps, unit, batch_size),), finish)

    def server(program: Program) -> Server:
        return stepping_server(
            program.start()[0], server_optimizer, lambda means: scaled(means["move"], -1.0)
        )

    guide = constructed(features=model.global_features, scale=model.prior_scale, hidden=hidden)
    return Method("fedvi", model, guide, client, server)


def every_other(batch: ClientBatch) -> tuple[ClientBatch, ClientBatch]:
    """Return a support set of every other row, and a query set of the others, not scaled up."""
    halves = []
    for first in (0, 1):
        alone = first and batch.num_rows == 1  # no row is left to score: take a padded one
        where = slice(0, 1) if alone else slice(first, None, 2)
        fields = {name: v[:, where] for name, v in batch.fields.items()}
        rows = batch.mask()[:, where] & (not alone)
        halves.append(replace(batch, fields=fields, rows=rows, is_mini_batch=False))
    return halves[0], halves[1]


def queried(batch: ClientBatch) -> Tensor:
    """Return the number of rows without padding, ()."""
    return batch.mask().sum().to(batch.counts.dtype)
