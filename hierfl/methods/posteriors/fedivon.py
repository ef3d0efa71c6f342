"""FedIvon: variational online Newton steps at the clients, and the product of their Gaussians.

    client:  m, h <- the server's;  for every mini-batch, with d = diag(-Hessian of log p(z)) / (N n_k):
                 z ~ N(m, 1 / (N n_k (h + d))),    g^ = grad nll_k(z) / n_k,    h^ = g^ (z - m) N n_k (h + d)
                 g <- b1 g + (1 - b1) g^
                 h <- b2 h + (1 - b2) h^ + (1 - b2)^2 (h - h^)^2 / (2 (h + d))
                 m <- m - lr (g / (1 - b1^t) - grad log p(m) / (N n_k)) / (h + d)
    server:  A_k = n_k (h_k + d_k);   m <- (sum_k A_k)^-1 sum_k A_k m_k,    q = N(m, (sum_k A_k)^-1)

h + d stays positive whatever the draws. It is Adam's cost, with a posterior. Each client's noise is
that of all rows, as if all N clients were like it.

Source: Pal, Gupta, Sarwar and Rai 2025, TMLR, arXiv:2411.18385, and Shen et al. 2024,
arXiv:2402.17641, for IVON. Differences: any Normal prior, divided among the clients, in place of
weight decay, and counted once in the product; the paper weights by h alone.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, scaled, sub, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Phase, Server, Up, slope
from hierfl.methods.about import About
from hierfl.methods.posteriors.common_sites import (
    CommonSites,
    common_sites,
    product_server,
    product_share,
)
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


class FedIvonWork(NamedTuple):
    """A client's Gaussian, and its steps in a round.

    m, h and the mean gradient; slope and diagonal Hessian of -log p(m) / N, at the server's m; the
    steps taken, (), and the last loss, ().
    """

    mean: Params
    curvature: Params
    momentum: Params
    pull: Params
    bent: Params
    taken: Tensor
    loss: Tensor


@About(
    infers="one global posterior by variational online Newton, at Adam's cost",
    source="Pal et al. 2025, arXiv:2411.18385",
    common="sites",
    guide="independent Gaussians",
    new="the global posterior",
    down="`z`; means over clients of their precisions and numbers of rows",
    up=(
        "`shift`: how far its mean moved, times its precision; `precision`: of all its rows; "
        "`rows`: their number; `loss`*"
    ),
)
def fedivon(
    model: Model,
    *,
    lr: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.999),
    curvature_start: float = 0.1,
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
    draws: int = 1,
    temperature: float = 1.0,
) -> Method:
    """Return FedIvon of a program whose sites are all global, with independent Normal priors.

    Args:
        model: as for `fola`.
        lr: step size of the mean, > 0; a step is the mean gradient of a row over its curvature.
            lr, betas and curvature_start: in the middle of the ranges of IVON's authors.
        betas: decay rates of the gradient and of the curvature, in [0, 1] and below 1 for the first;
            with 1 for the second the curvature stays where it starts.
        curvature_start: h of a row before the first round, > 0.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        draws: of z, that each step averages over.
        temperature: of the noise, 0 or more; 0: the mean alone, with no curvature learned.

    Raises:
        ValueError: an option is outside its range.
        ProgramError: (at fit) as for `fola`.
    """
    first, second = betas
    expect(
        lr=(lr, "(0, inf)"),
        curvature_start=(curvature_start, "(0, inf)"),
        temperature=(temperature, "[0, inf)"),
        draws=(draws, "[1, inf)"),
        **{"betas[0]": (first, "[0, 1)"), "betas[1]": (second, "[0, 1]")},
    )

    def client(program: Program) -> Client:
        sites = common_sites(program, "fedivon", independent=True)
        share, count = program.share, float(program.num_clients)

        def start(message: Tree, own: Tree) -> FedIvonWork:
            z, none = message["z"], torch.zeros(())
            pull, bent = (scaled(part, share) for part in sites.prior_slope(z))
            h = scaled(sub(message["precision"], bent), 1.0 / message["rows"])
            return FedIvonWork(z, h, zeros_like(z), pull, bent, none, none)

        def move(work: FedIvonWork, message: Tree, batch: ClientBatch) -> FedIvonWork:
            mean, h, rows = work.mean, work.curvature, batch.counts.sum()
            near = scaled(work.bent, 1.0 / rows)
            whole = add(h, near)
            precision = scaled(whole, count * rows)
            gradient, hat, value = drawn_slopes(sites, mean, precision, batch, draws, temperature)
            taken = work.taken + 1.0
            momentum = tree_map(lambda m, g: first * m + (1.0 - first) * g, work.momentum, gradient)
            if temperature:
                h = tree_map(partial(new_curvature, second), h, hat, whole)
            debias = 1.0 - first**taken

            def moved(m: Tensor, g: Tensor, h: Tensor, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
                return m - lr * (g / debias + p / rows + d * a) / (h + d)

            away = sub(mean, message["z"])
            mean = tree_map(moved, mean, momentum, h, near, work.pull, away)
            return FedIvonWork(mean, h, momentum, work.pull, work.bent, taken, value)

        def finish(work: FedIvonWork, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            precision = add(scaled(work.curvature, rows), work.bent)
            shift = tree_map(torch.mul, precision, sub(work.mean, message["z"]))
            return product_share(precision, shift, work.loss, rows), own

        return Client(
            own={},
            start=start,
            phases=(Phase(move, steps, unit, batch_size, turns=draws),),
            finish=finish,
            params=sites.served,
            adapt=(),
        )

    def server(program: Program) -> Server:
        sites = common_sites(program, "fedivon", independent=True)
        bent = scaled(sites.prior_slope(sites.start())[1], program.share)
        return product_server(sites, tree_map(lambda b: b + curvature_start, bent))

    return Method("fedivon", model, mean_field, client, server)


def new_curvature(b2: float, h: Tensor, hat: Tensor, whole: Tensor) -> Tensor:
    """Return the next curvature of a row, which with the prior's is positive."""
    new = 1.0 - b2
    return b2 * h + new * hat + 0.5 * (new * (h - hat)).square() / whole


def drawn_slopes(
    sites: CommonSites,
    mean: Params,
    precision: Params,
    batch: ClientBatch,
    draws: int,
    temperature: float,
) -> tuple[Params, Params, Tensor]:
    """Return the gradient at draws, the curvature of a row that they show, and the loss."""
    gradient, curvature, loss = zeros_like(mean), zeros_like(mean), torch.zeros(())
    for draw in range(draws):
        key = batch.redrawn(draw).key[0]
        away = {
            name: temperature**0.5
            * noise.normals(noise.fold(key, noise.word(name)), tuple(p.shape), p.dtype)
            * p.rsqrt()
            for name, p in precision.items()
        }
        here, value = slope(lambda z: sites.mean_nll(z, batch), add(mean, away))
        gradient = add(gradient, scaled(here, 1.0 / draws))
        bent = tree_map(lambda g, a, p: g * a * p / draws, here, away, precision)
        curvature, loss = add(curvature, bent), loss + value / draws
    return gradient, curvature, loss
