"""FedBN: FedAvg, with batch normalization local to each client.

    client:  w <- (theta, its own b_k);  for every mini-batch:  w <- w - lr grad nll(w), normalized by the mini-batch;
             statistics in b_k <- those of all its rows, at the weights of the round's end
    server:  theta <- sum_k (n_k / n) theta_k

Source: Li et al. 2021, arXiv:2102.07623, Algorithm 1. Differences: means are weighted by rows
(uniform in its code), and statistics are exact at the end of a round instead of a running mean over
its steps. Layers are found by their type, not by "bn" in their name.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, chosen
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import Descent, check_no_sites, plain_average
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

LEARNING = "norm.learning"


@About(
    infers="FedAvg with each client's own batch normalization",
    source="Li et al. 2021, arXiv:2102.07623",
    common="weights except batch norm",
    own="batch norm",
    kept="its batch normalization: weights and statistics",
    crosses="its copy of the weights",
    new="statistics of its rows",
    down="the weights, batch normalization apart",
    up="`theta`*: the same weights after training; `loss`*",
)
def fedbn(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 32,
) -> Method:
    """Return FedBN of `hierfl.models.batch_norm_network(module)`.

    Without batch norm this is FedAvg; no warning is given. A client that was in no round predicts
    by the statistics of its rows at the common weights, with the scale and shift that the module
    has.

    Args:
        model: a program with global params and local ones, and no latent sites.
        optimizer: of the client, restarted in each round. Defaults: the authors' for digits.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites.
    """
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        above, mine = program.start()
        check_no_sites(program, "fedbn", "models.batch_norm_network")
        statistics = [
            name for name in mine if name == LEARNING or name.rpartition(".")[2] in ("mean", "var")
        ]
        learning = {LEARNING: torch.ones_like(mine[LEARNING])} if LEARNING in mine else {}

        def been(there: float) -> Tree:
            """Whether the client has been in a round: its statistics are of its rows."""
            return {"seen": torch.tensor(there)} if statistics else {}

        def split(params: Params) -> tuple[Params, Params]:
            moving = {k: v for k, v in params.items() if k not in statistics}
            return moving, {k: v for k, v in params.items() if k in statistics}

        def start(message: Tree, own: Tree) -> Tree:
            return {**descent.begin(split(params(message, own))[0]), "kept": split(own)[1]}

        def loss(w: Params, work: Tree, message: Tree, batch: ClientBatch) -> Tensor:
            return program.mean_loss({**w, **work["kept"], **learning}, batch)

        def looked(params: Params, now: Params, batch: ClientBatch) -> Params:
            there = program.derive({}, {**params, **now, **learning}, batch)
            seen = {f"norm.{name.removeprefix('seen.')}": value for name, value in there.items()}
            return {name: seen.get(name, value) for name, value in now.items()}

        def look(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return {**work, "kept": looked(work["w"], work["kept"], batch)}

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            theta = {name: work["w"][name] for name in above}
            personal = {**{k: v for k, v in work["w"].items() if k in mine}, **work["kept"]}
            up = {"theta": Share(theta, rows), "loss": Share(work["loss"], rows)}
            return up, {**{name: personal[name] for name in mine}, **been(1.0)}

        def params(message: Tree, own: Tree) -> Params:
            return {**message, **{name: own[name] for name in mine}}

        def settle(message: Tree, own: Tree, batch: ClientBatch) -> Tree:
            now = split(own)[1]
            of_rows = looked(params(message, own), now, batch)
            return {**own, **chosen(own["seen"], now, of_rows)}

        return Client(
            own={**mine, **been(0.0)},
            start=start,
            phases=(descent.phase(loss), Phase(look, 1 if statistics else 0)),
            finish=finish,
            params=params,
            adapt=(Phase(look),) if statistics else (),
            seen=(lambda own: own["seen"]) if statistics else None,
            settle=settle if statistics else None,
        )

    return Method("fedbn", model, delta, client, plain_average)
