"""SCAFFOLD: FedAvg with each step corrected for how far a client's gradient is from the mean.

    client:  w <- theta;  for every mini-batch:  w <- w - lr (grad nll(w) - c_k + c)
             c_k' <- c_k - c + (theta - w) / (K lr),                 K the steps taken
    server:  theta <- theta + lr_g mean_k (w_k - theta)
             c <- c + (S / N) mean_k (c_k' - c_k)                over S of N clients

Source: Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II. Difference: both means may
be weighted by rows. One option sets both, else c would decide the optimum. No part is Bayesian:
params are points, and a correction, linear in w, has no density.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, scaled, sub, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import common_params
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Program
from hierfl.program.sites import Model


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

        def start(message: Tree, own: Tree) -> Tree:
            none = torch.zeros(())
            work = {"w": message["theta"], "correction": sub(message["c"], own["c"])}
            return {**work, "taken": none, "loss": none}

        def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, value = slope(lambda w: program.mean_loss(w, batch), work["w"])
            w = tree_map(lambda w, g, c: w - lr * (g + c), work["w"], gradient, work["correction"])
            return {**work, "w": w, "taken": work["taken"] + 1.0, "loss": value}

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            weight = rows if weights == "rows" else torch.ones_like(rows)
            moved = sub(work["w"], message["theta"])
            # a client that took no step knows no mean gradient
            by = torch.where(work["taken"] > 0.0, 1.0 / (lr * work["taken"].clamp(min=1.0)), 0.0)
            mean = tree_map(lambda a, d: -a - by * d, work["correction"], moved)
            c = tree_map(lambda new, old: torch.where(by > 0.0, new, old), mean, own["c"])
            new = 1.0 - own["seen"]
            up = {
                "moved": Share(moved, weight),
                "corrected": Share(scaled(sub(c, own["c"]), weight)),
                "joined": Share({"clients": new, "weight": new * weight}),
                "loss": Share(work["loss"], weight),
            }
            return up, {"c": c, "seen": torch.ones(())}

        return Client(
            own={"c": zero, "seen": torch.zeros(())},
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

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        moved = tree_map(lambda t, d: t + server_lr * d, state["theta"], means["moved"])
        whole = add(state["sum"], scaled(means["corrected"], clock.clients))
        joined = add(state["joined"], scaled(means["joined"], clock.clients))
        return {"theta": moved, "sum": whole, "joined": joined}

    def down(state: Tree, clock: Clock) -> Tree:
        count = state["joined"]["clients"]
        whole = program.num_clients * state["joined"]["weight"] / count.clamp(min=1.0)
        c = scaled(state["sum"], torch.where(count > 0.0, 1.0 / whole, 0.0))
        return {"theta": state["theta"], "c": c}

    joined = {"clients": torch.zeros(()), "weight": torch.zeros(())}
    start = {"theta": theta, "sum": zeros_like(theta), "joined": joined}
    return Server(start, update, down=down, relaxed=lambda beta: _server(program, beta * server_lr))
