"""FedHB with a mixture prior: each client's weights lie near one of K common networks.

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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    descent = Descent(optimizer, steps, unit, batch_size)
    mixture = NetworkMixture(networks, spread**2)

    def client(program: Program) -> Client:
        return mixture.client(descent, program)

    def server(program: Program) -> Server:
        theta = starts_of(common_params(program, "fedhb_mixture"), networks, program.seed, starts)
        return mixture.server(theta, program.num_clients)

    return Method("fedhb_mixture", model, delta, client, server)


@dataclass(frozen=True)
class NetworkMixture:
    """The mixture of K networks, and its variance s^2."""

    networks: int
    variance: float

    def nearness(self, w: Params, theta: Params) -> Tensor:
        """Return -|w - r_j|^2 / (2 s^2), (K,)."""
        squares = ((w[n][None] - theta[n]).square().view(self.networks, -1).sum(1) for n in w)
        return -sum(squares, torch.zeros(self.networks)) / (2.0 * self.variance)

    def of_most(self, message: Tree) -> Params:
        """Return the network of most clients."""
        largest = torch.arange(self.networks) == message["share"].argmax()
        return of_mask(largest, message["theta"])

    def client(self, descent: Descent, program: Program) -> Client:
        """Return the client of one program."""
        blank = common_params(program, "fedhb_mixture")

        def params(message: Tree, own: Tree) -> Params:
            return chosen(own["share"].sum(), own["w"], self.of_most(message))

        def start(message: Tree, own: Tree) -> Tree:
            return descent.begin(params(message, own))

        def choose(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            fits_best = of_least_loss(program, message["theta"], batch)
            return {**work, "w": of_mask(fits_best, message["theta"])}

        def loss(w: Params, work: Tree, message: Tree, batch: ClientBatch) -> Tensor:
            pull = self.nearness(w, message["theta"]).logsumexp(0)
            return program.mean_loss(w, batch) - (pull / batch.counts).sum()

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            share = self.nearness(work["w"], message["theta"]).softmax(0)
            mine = {"theta": along(share, work["w"]), "share": share}
            up = {"mine": Share(mine), "loss": Share(work["loss"], rows)}
            return up, {"w": work["w"], "share": share}

        return Client(
            own={"w": tree_map(torch.zeros_like, blank), "share": torch.zeros(self.networks)},
            start=start,
            phases=(Phase(choose), descent.phase(loss)),
            finish=finish,
            params=params,
            seen=lambda own: own["share"].sum(),
        )

    def server(self, theta: Params, clients: int) -> Server:
        """Return the server that moves to the most likely networks."""

        def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            share = means["mine"]["share"]

            def best(summed: Tensor) -> Tensor:
                near = share.view(-1, *[1] * (summed.dim() - 1))
                return summed / (self.variance / clients + near)

            return {"theta": tree_map(best, means["mine"]["theta"]), "share": share}

        even = torch.ones(self.networks) / self.networks
        return Server({"theta": theta, "share": even}, update)
