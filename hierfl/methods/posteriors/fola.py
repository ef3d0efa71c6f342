"""FOLA: each client's online Laplace approximation, and the product of the clients' Gaussians.

With U_k = -log p(y_k | z) - log p(z) / N, client k's share of the pooled problem, and F the mean
precision of a row that the server knows from the round before,

    client:  z_k <- z;  for every mini-batch:  z_k <- z_k - lr grad[ U_k / n_k + trust/2 (z_k - z)' F (z_k - z) ]
             A_k = sum_n diag(grad log p(y_kn | z_k))^2 + diag(-Hessian of log p(z)) / N
    server:  z <- [sum_k (trust n_k F + A_k)]^-1 sum_k (trust n_k F + A_k) z_k,     q = N(z, (sum_k A_k)^-1)

Where all is Gaussian with independent unknowns, and A_k is the Hessian, the fixed point is the
posterior for any `trust`.

Source: Liu, Jiang, Zheng, Chen, Qi, Huang and Shao 2021, arXiv:2102.01936. Differences: the paper
adds each round's Fisher information to all before, and divides the penalty by the round; here it
is that of the last round, so that q has each row once. The paper squares the mean gradient of a
mini-batch of b rows, which is b times too small; here mini-batches of `fisher_rows` rows are
squared and multiplied by b, and one row is exact. The prior is divided among the clients.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, scaled, sub, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Phase, Server, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, DescentState
from hierfl.methods.posteriors.common_sites import common_sites, product_server, product_share
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="one global posterior, the product of clients' Laplace approximations",
    source="Liu et al. 2021, arXiv:2102.01936",
    common="sites",
    guide="independent Gaussians, by squared gradients",
    new="the global posterior",
    down="`z`; means over clients of their precisions and numbers of rows",
    up=(
        "`shift`: how far its point moved, times its precision; `precision`: of all its rows; "
        "`rows`: their number; `loss`*"
    ),
)
def fola(
    model: Model,
    *,
    trust: float = 1.0,
    product: bool = True,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
    fisher_rows: int = 1,
) -> Method:
    """Return FOLA of a program whose sites are all global, with independent Normal priors.

    Where a network fits its rows closely, their gradients vanish, and with them what the posterior
    knows beyond the prior: draws then predict as badly as the prior's, however good the mean is.
    Take a narrow prior, or `fedivon`, whose steps see their own draws.

    Args:
        model: such as `hierfl.models.bayesian_network(module, local="none",
            global_prior=Normal(0, 1))`; other priors are curved where they are sampled.
        trust: weight of the pull toward the server's posterior, 0 or more; 1: its precision, as if
            the client had all rows. The paper tunes it.
        product: whether the server weights clients by their precisions; False: by rows alone, as
            `fedavg`.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`). steps, unit, batch_size
            and optimizer: as `fedavg`'s.
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        fisher_rows: rows of a mini-batch in the pass that squares gradients. More are faster; the
            product of few and large ones is off where gradients of rows are far from independent.

    Raises:
        ValueError: `trust` is negative, or `fisher_rows` below 1.
        ProgramError: (at fit) the model has local sites, params without a prior, or priors that
            depend on other sites or do not curve down.
    """
    expect(trust=(trust, "[0, inf)"), fisher_rows=(fisher_rows, "[1, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        sites = common_sites(program, "fola", independent=True)

        def start(message: Tree, own: Tree) -> DescentState:
            return descent.begin(message["z"], beside=zeros_like(message["z"]))

        def loss(w: Params, work: DescentState, message: Tree, batch: ClientBatch) -> Tensor:
            value = sites.mean_loss(w, batch)
            if not trust:
                return value
            held = scaled(message["precision"], trust / message["rows"])
            pulls = (0.5 * (held[n] * (w[n] - message["z"][n]).square()).sum() for n in w)
            return value + sum(pulls, torch.zeros(()))

        def square(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            """Add to `beside` the squared gradients of rows."""
            gradient, _ = slope(lambda w: sites.mean_nll(w, batch), work.w)
            rows = batch.mask().sum().to(batch.counts.dtype)
            fisher = tree_map(lambda f, g: f + (rows * g).square(), work.beside, gradient)
            return work._replace(beside=fisher)

        def finish(work: DescentState, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            bent = scaled(sites.prior_slope(work.w)[1], program.share)
            precision, moved = add(work.beside, bent), sub(work.w, message["z"])
            held = scaled(message["precision"], trust / message["rows"] * rows)
            weight = add(held, precision)
            shift = tree_map(torch.mul, weight, moved) if product else scaled(moved, rows)
            return product_share(precision, shift, work.loss, rows), own

        return Client(
            own={},
            start=start,
            phases=(descent.phase(loss), Phase(square, 1, "epoch", fisher_rows, alone=math.inf)),
            finish=finish,
            params=sites.served,
            adapt=(),
        )

    def server(program: Program) -> Server:
        sites = common_sites(program, "fola", independent=True)
        begin = scaled(sites.prior_slope(sites.start())[1], program.share)
        return product_server(sites, begin, trust, weighted=product)

    return Method("fola", model, mean_field, client, server)
