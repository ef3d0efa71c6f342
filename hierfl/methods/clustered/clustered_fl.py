"""Clustered federated learning: FedAvg within clusters, halved once their clients disagree.

    client:  w <- the model of its cluster;  for every mini-batch:  w <- w - lr grad nll(w);  sends D_k = w - start
    server:  within each cluster  D <- sum_k (n_k / n) D_k,  theta <- theta + D
             if |D| < mean_norm and max_k |D_k| > client_norm: halve the cluster, so that the
             largest cosine between D_k of one half and D_k of the other is smallest

Source: Sattler et al. 2020, arXiv:1910.01991, Algorithm 1 (its Eq. (13) is the condition, with
rounds counted as in its code). The best halving by that measure is single linkage; the code's
complete linkage often misses it. A client that joins later takes the cluster whose model has the
smallest loss on its rows, where the paper sends its update down the tree of halvings, for which the
server would have to keep every update.

As a Bayesian model it is a mixture of clients with hard labels, found greedily, and points.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, sub, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Each, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, common_params
from hierfl.methods.parts.stacked import at_each, flat, mixed, of_least_loss, part
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

SMALLEST = 3  # clients of a cluster that may be halved


class ClusteredFLClientState(NamedTuple):
    """The model of a client's cluster."""

    mail: Params


class ClusteredFLServerState(NamedTuple):
    """Of N clients, the model that each is at, (N, ...), and its cluster, (N,) int64."""

    theta: Params
    cluster: Tensor


@About(
    infers="a model for each cluster of clients, found by halving clusters that disagree",
    source="Sattler et al. 2020, arXiv:1910.01991",
    common="a model per cluster",
    own="its cluster, found by the server",
    guide="points; hard labels",
    kept="its cluster's weights",
    discloses="summaries",
    new="the model of least loss",
    down="to each client the weights of its cluster",
    up="`away`, seen individually: how far it moved them, and its number of rows; `loss`*",
)
def clustered_fl(
    model: Model,
    *,
    mean_norm: float = 0.4,
    client_norm: float = 1.6,
    warmup_rounds: int = 20,
    optimizer: Optimizer = SGD(0.1, momentum=0.9),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 128,
) -> Method:
    """Return clustered FL of a program whose params are all global, as `hierfl.models.network`.

    `clusters` in the history is their number.

    Args:
        model: a program with global params and no latent sites.
        mean_norm: norm of a cluster's mean update below which it has settled, 0 or more; 0: FedAvg.
            Defaults: the authors' for EMNIST. They depend on the step size and on the number of
            params.
        client_norm: norm of a client's update above which it has not settled.
        warmup_rounds: rounds before the first halving.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `mean_norm` or `client_norm` is negative.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(mean_norm=(mean_norm, "[0, inf]"), client_norm=(client_norm, "[0, inf]"))
    expect(warmup_rounds=(warmup_rounds, "[0, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        first = common_params(program, "clustered_fl")

        def choose(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            best = mixed(of_least_loss(program, message, batch), message)
            return work._replace(beside=ClusteredFLClientState(best))

        def finish(
            work: DescentState, message: Tree, own: ClusteredFLClientState, rows: Tensor
        ) -> tuple[Up, ClusteredFLClientState]:
            away = {"by": sub(work.w, own.mail), "rows": rows}
            up: Up = {"away": Each(away), "loss": Share(work.loss, rows)}
            return up, work.beside

        return Client(
            own=ClusteredFLClientState(first),
            start=lambda message, own: descent.begin(own.mail, own),
            phases=(descent.on_likelihood(program),),
            finish=finish,
            params=lambda message, own: own.mail,
            adapt=(Phase(choose),),
            most_adapting=1,
            new=lambda message: ClusteredFLClientState(part(message, 0)),
            mail=("mail",),
        )

    def server(program: Program) -> Server:
        count = program.num_clients

        def update(
            state: ClusteredFLServerState, means: dict[str, Tree], clock: Clock
        ) -> ClusteredFLServerState:
            reports = means["away"]
            order = reports.ids.argsort()  # as the data has them
            by = tree_map(lambda v: v[order], reports.value["by"])
            rows = reports.value["rows"][order]
            cluster, mean = state.cluster.clone(), _means(by, rows, state.cluster)
            vectors, of_cluster = flat(by), flat(mean)
            for label in cluster.unique().tolist() if clock.round >= warmup_rounds else ():
                members = (cluster == label).nonzero()[:, 0]
                settled = bool(of_cluster[members[0]].norm() < mean_norm)
                unlike = bool(vectors[members].norm(dim=1).max() > client_norm)
                if settled and unlike and len(members) >= SMALLEST:
                    second = halved(vectors[members])
                    cluster[members[second]] = int(cluster.max()) + 1
            return ClusteredFLServerState(add(state.theta, mean), cluster)

        def final(state: ClusteredFLServerState, clock: Clock) -> Tree:
            labels, sizes = state.cluster.unique(return_counts=True)
            labels = labels[sizes.argsort(descending=True, stable=True)]  # the largest is first
            firsts = torch.stack([(state.cluster == k).nonzero()[0, 0] for k in labels])
            return tree_map(lambda v: v[firsts], state.theta)

        theta = at_each(common_params(program, "clustered_fl"), count)
        return Server(
            ClusteredFLServerState(theta, torch.zeros(count, dtype=torch.long)),
            update,
            down=lambda state, clock: {},
            final=final,
            logged=lambda state: {"clusters": float(len(state.cluster.unique()))},
            mail=lambda state: state.theta,
            grows=frozenset({"theta"}),  # of which the last message has one for each cluster
            wrong=lambda message, up, rows: (
                "its number of rows is not the one that it began with"
                if float(up["away"].value["rows"]) != rows
                else None
            ),
        )

    return Method(
        "clustered_fl", model, delta, client, server, everyone=True, discloses="summaries"
    )


def halved(updates: Tensor) -> Tensor:
    """Return which of a cluster's clients go into the second half, (C,) bool, by updates (C, P)."""
    # imported here: it takes a quarter of a second, and nothing else of hierfl needs it
    from scipy.cluster.hierarchy import fcluster, single
    from scipy.spatial.distance import pdist

    distances = pdist(updates.double().numpy(), "cosine")
    tree = single(np.nan_to_num(distances, nan=1.0))  # of updates that are zero
    half = torch.from_numpy(fcluster(tree, 2, criterion="maxclust"))
    return half != half[0]


def _means(by: Tree, rows: Tensor, cluster: Tensor) -> Tree:
    same = (cluster[:, None] == cluster).to(rows.dtype) * rows
    return mixed(same / same.sum(1, keepdim=True), by)
