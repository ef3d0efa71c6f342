"""IFCA: K models, and each client trains the one that fits its rows best.

    client:  z <- the k of the smallest nll(theta_k) on all its rows;  w <- theta_z;
             for every mini-batch:  w <- w - lr grad nll(w)
    server:  theta_k <- mean of w over the clients with z = k; a theta_k that none chose stays

Source: Ghosh et al. 2020, arXiv:2006.04088, Algorithm 1, with averages of models; clients count
equally, as in the authors' code (`hierfl.methods.by_rows` does not apply: the mean is by cluster;
take weights="rows"). A client sends its model at its cluster's place among zeros, and the mask: the
server needs sums alone, and does not learn who chose what. The code picks a test client's cluster
by its test loss; here by its own rows.

As a Bayesian model it is a mixture of clients, w_k = theta_{z_k}, with a hard, uniform label z_k.
The theta_k are points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, common_params
from hierfl.methods.parts.stacked import along, of_least_loss, of_mask, starts_of
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="a model for each of K clusters of clients, chosen by loss",
    source="Ghosh et al. 2020, arXiv:2006.04088",
    common="K models",
    own="which of them",
    guide="points; a hard label",
    kept="its cluster",
    new="the model of least loss",
    down="the weights of K models, and the share of clients that chose each",
    up=(
        "`mine`: its weights after training at its cluster's place among K, zeros "
        "elsewhere, and a mask; `loss`*"
    ),
)
def ifca(
    model: Model,
    *,
    clusters: int = 4,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    steps: int = 10,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = None,
    weights: Literal["uniform", "rows"] = "uniform",
    starts: Sequence[Params] | None = None,
) -> Method:
    """Return IFCA of a program whose params are all global, such as `hierfl.models.network`.

    Clusters that start badly may all lose to one: run several seeds of `fit`, and keep the run of
    the smallest loss.

    Args:
        model: a program with global params and no latent sites.
        clusters: K. Defaults: the authors' for rotated MNIST, 10 steps on all rows with step size
            0.1.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        weights: of the mean within a cluster: "uniform", or by "rows".
        starts: K sets of global params to start from. Default None: those of the model, each
            tensor's entries in K orders.

    Raises:
        ValueError: `clusters` is below 1.
        ProgramError: (at fit) the model has latent sites or local params; or two clusters start
            equal.
    """
    expect(clusters=(clusters, "[1, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size)

    def most(message: Tree) -> Tensor:
        largest = torch.arange(clusters) == message["share"].argmax()
        return largest.to(torch.get_default_dtype())

    def client(program: Program) -> Client:
        common_params(program, "ifca")

        def params(message: Tree, own: Tree) -> Params:
            cluster = chosen(own["cluster"].sum(), own["cluster"], most(message))
            return of_mask(cluster, message["theta"])

        def start(message: Tree, own: Tree) -> Tree:
            return {**descent.begin(params(message, own)), "cluster": own["cluster"]}

        def choose(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            cluster = of_least_loss(program, message["theta"], batch)
            return {**work, "cluster": cluster, "w": of_mask(cluster, message["theta"])}

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            cluster = work["cluster"]
            mine = {"theta": along(cluster, work["w"]), "share": cluster}
            weight = rows if weights == "rows" else 1.0
            up = {"mine": Share(mine, weight), "loss": Share(work["loss"], rows)}
            return up, {"cluster": cluster}

        choosing = Phase(choose)
        return Client(
            own={"cluster": torch.zeros(clusters)},
            start=start,
            phases=(choosing, descent.on_likelihood(program)),
            finish=finish,
            params=params,
            adapt=(choosing,),
            most_adapting=1,
            seen=lambda own: own["cluster"].sum(),
            new=lambda message: {"cluster": most(message)},
        )

    def server(program: Program) -> Server:
        def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            share = means["mine"]["share"]

            def moved(before: Tensor, summed: Tensor) -> Tensor:
                of_all = share.view(-1, *[1] * (before.dim() - 1))
                return torch.where(of_all > 0.0, summed / of_all.clamp(min=1e-30), before)

            theta = tree_map(moved, state["theta"], means["mine"]["theta"])
            return {"theta": theta, "share": share}

        theta = starts_of(common_params(program, "ifca"), clusters, program.seed, starts)
        return Server({"theta": theta, "share": torch.ones(clusters) / clusters}, update)

    return Method("ifca", model, delta, client, server)
