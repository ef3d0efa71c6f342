"""FedPA: the mode of the product of clients' Gaussian posteriors, from one vector of each client.

    client:  x_1..x_l <- draws of its posterior
             S <- r I + (1 - r) cov(x),   r = 1 / (1 + (l - 1) rho)
             D_k <- S^-1 (theta - mean x),   in O(l^2 d) time, without a matrix of d x d
    server:  theta <- SGD with momentum along sum_k (n_k / n) D_k

The sum is the gradient of sum_k (n_k / n) |theta - mu_k|^2 / 2 in the metrics S_k^-1, which
vanishes at the mode of the product. A draw is the mean of SGD's iterates in one pass over the rows.
In the first rounds D_k is theta minus the last iterate, as in FedAvg.

Source: Al-Shedivat, Gillenwater, Xing and Rostamizadeh 2021, arXiv:2010.05273, Algorithms 1 to 4.
Weights by rows belong to posteriors of the mean loss, and so it is the mean loss that clients fit
here.

Its Bayesian part is each client's posterior under a flat prior, as a Gaussian, and the mode of their
product. The answer is a point.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.add_to_row import add_to_row
from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, as_tree, as_vector, chosen, sub
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import common_params, stepping_server
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Program
from hierfl.program.sites import Model


class FedPAWork(NamedTuple):
    """A client's weights, its draws' sums of iterates, (l, d), the steps taken, (), and the last loss, ()."""

    at: Stepped
    sums: Tensor
    taken: Tensor
    loss: Tensor


@About(
    infers="one global model, the mode of the product of the clients' Gaussian posteriors",
    source="Al-Shedivat et al. 2021, arXiv:2010.05273",
    common="params under a flat prior",
    guide="points; clients sample",
    new="the global model",
    down="the weights; whether to average",
    up="`moved`*: in the first rounds how far its weights moved, then S^-1 (theta - mean) of its draws; `loss`*",
)
def fedpa(
    model: Model,
    *,
    epochs: int = 5,
    burn_in: int = 1,
    shrinkage: float = 0.01,
    batch_size: int | None = 20,
    optimizer: Optimizer = SGD(0.02, momentum=0.9),  # noqa: B008 (frozen)
    server_optimizer: Optimizer = SGD(0.5, momentum=0.9),  # noqa: B008 (frozen)
    averaging_rounds: int | None = None,
) -> Method:
    """Return FedPA of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: as in `fedavg`; its params have a flat prior.
        epochs: passes over the rows in a round. Defaults of epochs, burn_in, shrinkage, batch_size
            and both optimizers: the authors', for EMNIST-62.
        burn_in: passes before the first draw; l = epochs - burn_in.
        shrinkage: rho, of the covariance, 0 or more. 0: D_k = theta - mean x.
        batch_size: rows of a mini-batch; None: all.
        optimizer: of the client, restarted in each round.
        server_optimizer: of the server, on the mean of D_k.
        averaging_rounds: rounds before the first with draws, in which D_k is theta minus the last
            iterate. None: 4/15 of all rounds, as the authors' 400 of 1500.

    Raises:
        ValueError: `shrinkage` is negative, or `burn_in` is negative or leaves no pass for a draw.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(burn_in=(burn_in, f"[0, {epochs})"), shrinkage=(shrinkage, "[0, inf)"))

    def steps_of(rows: Tensor) -> Tensor:
        """Return the mini-batches of a pass over a client's rows, ()."""
        return torch.ones(()) if batch_size is None else (rows / batch_size).ceil()

    def client(program: Program) -> Client:
        draws, size = epochs - burn_in, as_vector(common_params(program, "fedpa")).numel()

        def start(message: Tree, own: Tree) -> FedPAWork:
            at = Stepped(message["theta"], optimizer.init(message["theta"]))
            return FedPAWork(at, torch.zeros(draws, size), torch.zeros(()), torch.zeros(()))

        def move(work: FedPAWork, message: Tree, batch: ClientBatch) -> FedPAWork:
            gradient, value = slope(lambda w: program.mean_loss(w, batch), work.at.params)
            at = step(optimizer, gradient, work.at)
            draw = (work.taken / steps_of(batch.counts.sum())).floor() - burn_in
            away = as_vector(sub(at.params, message["theta"]))
            return FedPAWork(at, add_to_row(work.sums, away, draw), work.taken + 1.0, value)

        def finish(work: FedPAWork, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            theta = message["theta"]
            moved = product_gradient(work.sums, steps_of(rows), shrinkage)
            averaged = sub(theta, work.at.params)
            sent = chosen(message["averaging"], averaged, as_tree(moved, theta))
            return {"moved": Share(sent, rows), "loss": Share(work.loss, rows)}, own

        return Client(
            own={},
            start=start,
            phases=(Phase(move, epochs, "epoch", batch_size),),
            finish=finish,
            params=lambda message, own: message["theta"],
            adapt=(),
        )

    def down(state: Stepped, clock: Clock) -> Tree:
        last = math.ceil(4 * clock.rounds / 15) if averaging_rounds is None else averaging_rounds
        return {"theta": state.params, "averaging": torch.tensor(float(clock.round < last))}

    def server(program: Program) -> Server:
        theta = common_params(program, "fedpa")
        return stepping_server(theta, server_optimizer, lambda means: means["moved"], down)

    return Method("fedpa", model, delta, client, server)


def product_gradient(sums: Tensor, steps: Tensor, rho: float) -> Tensor:
    """Return S^-1 (theta - mean x), (d,); `sums` (l, d) is Y times `steps`, Y = x - theta.

    With Y~ = Y less its mean, Woodbury's identity gives in O(l^2 d) (rank-one updates in the paper)

        S^-1 b = (b - rho Y~' (I + rho Y~ Y~')^-1 Y~ b) / r,    b = -mean Y
    """
    count = len(sums)
    inner = sums @ sums.mT / steps**2  # Y Y'
    centered, equal = torch.eye(count) - 1.0 / count, torch.full((count,), 1.0 / count)
    system = torch.eye(count) + rho * centered @ inner @ centered
    held = centered @ torch.linalg.solve(system, centered @ (inner @ equal))
    return (1.0 + (count - 1) * rho) / steps * ((rho * held - equal) @ sums)
