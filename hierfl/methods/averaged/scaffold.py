"""SCAFFOLD: FedAvg with each step corrected for how far a client's gradient is from the mean.

    client:  w <- theta;  for every mini-batch:  w <- w - lr (grad nll(w) - c_k + c)
             c_k' <- c_k - c + (theta - w) / (K lr),                 K the steps taken
    server:  theta <- theta + lr_g mean_k (w_k - theta)
             c <- c + (S / N) mean_k (c_k' - c_k)                over S of N clients

Source: Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II. Difference: both means may
be weighted by rows. One option sets both, else c would decide the optimum. No part is Bayesian:
params are points, and a correction, linear in w, has no density.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, scaled, sub, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, common_params
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


class ScaffoldWork(NamedTuple):
    """A client's weights, c - c_k, the number of steps taken, (), and the last loss, ()."""

    w: Params
    correction: Params
    taken: Tensor
    loss: Tensor


class ScaffoldServerState(NamedTuple):
    """The weights, the sum of all weighted c_k, and how many clients took part, with what weight, ()."""

    theta: Params
    sum: Params
    clients: Tensor
    weight: Tensor


@About(
    infers="FedAvg whose steps are corrected for how clients differ",
    source="Karimireddy et al. 2020, arXiv:1910.06378",
    common="weights",
    own="a correction of its gradients",
    kept="its correction",
    new="the global model",
    down="the weights, and the clients' mean correction",
    up=(
        "`moved`, `loss`; `corrected`: the change of its correction, which is a mean "
        "gradient, times its weight; `joined`: 1 and its weight in its first round, else 0. "
        'Weights are 1, or rows with `weights="rows"`'
    ),
)
def scaffold(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    server_optimizer: Optimizer = SGD(1.0),  # noqa: B008
    weights: Literal["uniform", "rows"] = "uniform",
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
) -> Method:
    """Return SCAFFOLD of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: as in `fedavg`.
        optimizer: of the client, plain SGD. Defaults of optimizer, steps and batch_size: those of
            `fedavg`, as the paper tunes the step size.
        server_optimizer: of the server, plain SGD with step size eta_g. Default 1: the paper's
            experiments.
        weights: of both means. "uniform", the default: the paper's. "rows": by rows, as in
            `fedavg`. It decides the optimum: that of the mean of the clients' losses, or of all
            rows pooled.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: an optimizer is not plain SGD, the client's step size is 0, or `weights` is
            neither "uniform" nor "rows".
        ProgramError: (at fit) the model has latent sites or local params.
    """
    lr = plain_lr(optimizer, "optimizer", "its corrections are gradients, divided out of the steps")
    server_lr = plain_lr(server_optimizer, "server_optimizer", "its equation is one factor")
    if not lr:
        raise ValueError("optimizer is SGD(0.0): its step size must be above 0")
    expect(weights=(weights, ("uniform", "rows")))

    def client(program: Program) -> Client:
        zero = zeros_like(common_params(program, "scaffold"))

        def start(message: Tree, own: OwnParams) -> ScaffoldWork:
            none = torch.zeros(())
            return ScaffoldWork(message["theta"], sub(message["c"], own.params), none, none)

        def move(work: ScaffoldWork, message: Tree, batch: ClientBatch) -> ScaffoldWork:
            gradient, value = slope(lambda w: program.mean_loss(w, batch), work.w)
            w = tree_map(lambda w, g, c: w - lr * (g + c), work.w, gradient, work.correction)
            return ScaffoldWork(w, work.correction, work.taken + 1.0, value)

        def finish(
            work: ScaffoldWork, message: Tree, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            weight = rows if weights == "rows" else torch.ones_like(rows)
            moved = sub(work.w, message["theta"])
            # a client that took no step knows no mean gradient
            by = torch.where(work.taken > 0.0, 1.0 / (lr * work.taken.clamp(min=1.0)), 0.0)
            mean = tree_map(lambda a, d: -a - by * d, work.correction, moved)
            c = tree_map(lambda new, old: torch.where(by > 0.0, new, old), mean, own.params)
            new = 1.0 - own.seen
            up = {
                "moved": Share(moved, weight),
                "corrected": Share(scaled(sub(c, own.params), weight)),
                "joined": Share({"clients": new, "weight": new * weight}),
                "loss": Share(work.loss, weight),
            }
            return up, OwnParams(c, torch.ones(()))

        return Client(
            own=OwnParams(zero, torch.zeros(())),  # c_k
            start=start,
            phases=(Phase(move, steps, unit, batch_size),),
            finish=finish,
            params=lambda message, own: message["theta"],
            adapt=(),
        )

    def server(program: Program) -> Server:
        return _server(program, server_lr)

    return Method("scaffold", model, delta, client, server)


def _server(program: Program, server_lr: float) -> Server:
    """Return the server; until all clients took part, their weight is N times the mean of those that did."""
    theta = common_params(program, "scaffold")

    def update(
        state: ScaffoldServerState, means: dict[str, Tree], clock: Clock
    ) -> ScaffoldServerState:
        moved = tree_map(lambda t, d: t + server_lr * d, state.theta, means["moved"])
        whole = add(state.sum, scaled(means["corrected"], clock.clients))
        joined = scaled(means["joined"], clock.clients)
        clients, weight = state.clients + joined["clients"], state.weight + joined["weight"]
        return ScaffoldServerState(moved, whole, clients, weight)

    def down(state: ScaffoldServerState, clock: Clock) -> Tree:
        whole = program.num_clients * state.weight / state.clients.clamp(min=1.0)
        c = scaled(state.sum, torch.where(state.clients > 0.0, 1.0 / whole, 0.0))
        return {"theta": state.theta, "c": c}

    start = ScaffoldServerState(theta, zeros_like(theta), torch.zeros(()), torch.zeros(()))
    return Server(start, update, down=down, relaxed=lambda beta: _server(program, beta * server_lr))
