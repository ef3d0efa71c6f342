"""K common networks, of which each client has one: IFCA, and FedHB's mixture, where it stays near one.

IFCA: K models, and each client trains the one that fits its rows best.

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

FedHB with a mixture prior: each client's weights lie near one of K common networks.

    model:   r_j ~ N(0, I),  j = 1..K;    w_k ~ (1 / K) sum_j N(r_j, s^2 I);    y_k ~ p(y | w_k)
    client:  w <- the r_j of the smallest nll on all its rows;  for every mini-batch
                 w <- w - lr grad [ nll(w) - log sum_j exp(-|w - r_j|^2 / (2 s^2)) ] / n_k
             c_kj = softmax_j(-|w - r_j|^2 / (2 s^2))
    server:  r_j <- sum_k c_kj w_k / (s^2 + sum_k c_kj)

IFCA with a pull: clients keep weights of their own about the network of their kind, and share more
of them the smaller s is.

Source: Kim and Hospedales 2023, arXiv:2305.04979, the mixture case; their NIW case is `fedhb`.
Differences: q(w_k) is a point, theirs a Gaussian of a small constant width; a client starts in each
round at the network that fits its rows best; one without rows gets the network of most clients,
where theirs trains a network that chooses by an input. With a cohort, sums over clients are N times
its means.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, chosen, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState, common_params
from hierfl.methods.parts.stacked import along, mixed, of_least_loss, starts_of
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


class NetworksState(NamedTuple):
    """K networks, (K, ...), and the share of clients near each, (K,)."""

    theta: Params
    share: Tensor


@About(
    infers="a model for each of K clusters of clients, chosen by loss",
    source="Ghosh et al. 2020, arXiv:2006.04088",
    common="K models",
    own="which of them",
    guide="points; a hard label",
    kept="its cluster",
    new="the model of least loss",
    down="the weights of K models, and the share of clients that chose each",
    up="`mine`: its weights after training at its cluster's place among K, zeros elsewhere, and a mask; `loss`*",
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

    def client(program: Program) -> Client:
        common_params(program, "ifca")

        def params(message: Tree, own: Tensor) -> Params:
            return mixed(chosen(own.sum(), own, most(message)), message["theta"])

        def finish(
            work: DescentState, message: Tree, own: Tensor, rows: Tensor
        ) -> tuple[Up, Tensor]:
            weight = rows if weights == "rows" else 1.0
            return sent(work, work.beside, weight, rows), work.beside

        descent = Descent(optimizer, steps, unit, batch_size)
        choosing = choosing_of(program, clusters)
        return Client(
            own=torch.zeros(clusters),  # a mask of the client's cluster
            start=lambda message, own: descent.begin(params(message, own), own),
            phases=(choosing, descent.on_likelihood(program)),
            finish=finish,
            params=params,
            adapt=(choosing,),
            most_adapting=1,
            seen=lambda own: own.sum(),
            new=most,
        )

    def moved(before: Tensor, summed: Tensor, share: Tensor, clients: int) -> Tensor:
        return torch.where(share > 0.0, summed / share.clamp(min=1e-30), before)

    return Method("ifca", model, delta, client, server_of("ifca", clusters, starts, moved))


class FedHBMixtureClientState(NamedTuple):
    """A client's weights, and the shares c_kj, (K,); 0 before its first round."""

    w: Params
    share: Tensor


@About(
    infers="each client's weights near one of K common networks",
    source="Kim and Hospedales 2023, arXiv:2305.04979",
    common="K networks",
    own="weights near one of them",
    guide="points; shares of the networks",
    kept="its weights, and its shares of the networks",
    down="the weights of K networks, and the share of clients near each",
    up="`mine`: its weights at each network's place, times its share of it, and the shares; `loss`*",
)
def fedhb_mixture(
    model: Model,
    *,
    networks: int = 2,
    spread: float = 0.1**0.5,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    steps: int = 10,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 50,
    starts: Sequence[Params] | None = None,
) -> Method:
    """Return FedHB with a mixture prior, of a program whose params are all global.

    New clients are fitted by `fit.personalize(rows, rounds=e)`, by the same steps.

    Args:
        model: a program with global params and no latent sites, such as `hierfl.models.network`;
            each client has weights of its own in their place.
        networks: K. networks and spread: the authors'.
        spread: s, > 0, the standard deviation of clients' weights about their network.
        optimizer: of the client, restarted in each round. optimizer, steps, unit and batch_size:
            ours.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        starts: K sets of global params to start from. Default None: those of the model, each
            tensor's entries in K orders.

    Raises:
        ValueError: `networks` is below 1, or `spread` not above 0.
        ProgramError: (at fit) the model has latent sites or local params; or two networks start
            equal.
    """
    expect(networks=(networks, "[1, inf)"), spread=(spread, "(0, inf)"))
    variance = spread**2

    def nearness(w: Params, theta: Params) -> Tensor:
        """Return -|w - r_j|^2 / (2 s^2), (K,)."""
        squares = ((w[n][None] - theta[n]).square().view(networks, -1).sum(1) for n in w)
        return -sum(squares, torch.zeros(networks)) / (2.0 * variance)

    def client(program: Program) -> Client:
        blank = zeros_like(common_params(program, "fedhb_mixture"))

        def params(message: Tree, own: FedHBMixtureClientState) -> Params:
            return chosen(own.share.sum(), own.w, mixed(most(message), message["theta"]))

        def loss(w: Params, work: DescentState, message: Tree, batch: ClientBatch) -> Tensor:
            pull = nearness(w, message["theta"]).logsumexp(0)
            return program.mean_loss(w, batch) - (pull / batch.counts).sum()

        def finish(
            work: DescentState, message: Tree, own: FedHBMixtureClientState, rows: Tensor
        ) -> tuple[Up, FedHBMixtureClientState]:
            share = nearness(work.w, message["theta"]).softmax(0)
            return sent(work, share, 1.0, rows), FedHBMixtureClientState(work.w, share)

        descent = Descent(optimizer, steps, unit, batch_size)
        return Client(
            own=FedHBMixtureClientState(blank, torch.zeros(networks)),
            start=lambda message, own: descent.begin(params(message, own), own.share),
            phases=(choosing_of(program, networks), descent.phase(loss)),
            finish=finish,
            params=params,
            seen=lambda own: own.share.sum(),
        )

    def best(before: Tensor, summed: Tensor, share: Tensor, clients: int) -> Tensor:
        return summed / (variance / clients + share)

    server = server_of("fedhb_mixture", networks, starts, best)
    return Method("fedhb_mixture", model, delta, client, server)


def most(message: Tree) -> Tensor:
    """Return a mask (K,) of the network of most clients."""
    share = message["share"]
    return (torch.arange(len(share)) == share.argmax()).to(torch.get_default_dtype())


def choosing_of(program: Program, count: int) -> Phase:
    """Return the phase in which a client takes the one of K networks that fits its rows best, and its mask (K,)."""

    def choose(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
        mask = of_least_loss(program, message["theta"], batch)
        return work._replace(w=mixed(mask, message["theta"]), beside=mask)

    return Phase(choose, turns=count)


def sent(work: DescentState, share: Tensor, weight: float | Tensor, rows: Tensor) -> Up:
    """Return an update: weights at the place of each network, times the client's share of it."""
    mine = {"theta": along(share, work.w), "share": share}
    return {"mine": Share(mine, weight), "loss": Share(work.loss, rows)}


def server_of(
    name: str,
    count: int,
    starts: Sequence[Params] | None,
    moved: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Callable[[Program], Server]:
    """Return what makes the server of K networks, each `moved` by (it, sum of weights, share, N)."""

    def server(program: Program) -> Server:
        def update(state: NetworksState, means: dict[str, Tree], clock: Clock) -> NetworksState:
            share = means["mine"]["share"]

            def of_tensor(before: Tensor, summed: Tensor) -> Tensor:
                of_all = share.view(-1, *[1] * (before.dim() - 1))
                return moved(before, summed, of_all, program.num_clients)

            theta = tree_map(of_tensor, state.theta, means["mine"]["theta"])
            return NetworksState(theta, share)

        theta = starts_of(common_params(program, name), count, program.seed, starts)
        begin = NetworksState(theta, torch.ones(count) / count)
        return Server(begin, update, down=lambda state, clock: state._asdict())

    return server
