"""FedBN: FedAvg, but for batch normalisation, which every client keeps to itself.

    client:  w <- (theta, its own b_k);  for every mini-batch:  w <- w - lr grad nll(w), normalised by the mini-batch
             statistics of b_k <- those of all its rows, at the weights it has come to
    server:  theta <- sum_k (n_k / n) theta_k

Source: Li et al. 2021, arXiv:2102.07623, Algorithm 1. Differences: means by rows (uniform in its code), and exact statistics at
the end of a round instead of a running mean over its steps. Layers are found by their type, not by "bn" in their name.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.optimisers import SGD, Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model

LEARNING = "norm.learning"


@recorded
def fedbn(
    model: Model,
    *,
    optimiser: Optimiser = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 32,
) -> Method:
    """FedBN of `hierfl.models.batch_norm_network(module)`; without any such layer it is FedAvg, and says so by no word.

    Args:
        model: global params, and local ones that no prior ties together.
        optimiser: of the client, started anew each round. Defaults: the authors' for digits.
        steps: mini-batches a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows a mini-batch; None: all.

    Raises:
        ProgramError: the model has latent sites.
    """

    def client(program: Program) -> Client:
        above, mine = program.start()
        if program.latents.sites:
            raise ProgramError(
                "fedbn fits params alone, and this model has latent sites: take models.batch_norm_network"
            )
        kept = [
            name for name in mine if name == LEARNING or name.rpartition(".")[2] in ("mean", "var")
        ]
        learning = {LEARNING: torch.ones_like(mine[LEARNING])} if LEARNING in mine else {}

        def split(params: Params) -> tuple[Params, Params]:
            return {k: v for k, v in params.items() if k not in kept}, {
                k: v for k, v in params.items() if k in kept
            }

        def start(message: Tree, own: Tree) -> Tree:
            moving, _ = split({**message, **own})
            return {
                "w": moving,
                "state": optimiser.init(moving),
                "kept": split(own)[1],
                "loss": torch.zeros(()),
            }

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, value = slope(
                lambda w: program.mean_loss({**w, **lane["kept"], **learning}, batch), lane["w"]
            )
            w, state = step(optimiser, gradient, Stepped(lane["w"], lane["state"]))
            return {**lane, "w": w, "state": state, "loss": value}

        def look(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            seen = program.derive({}, {**lane["w"], **lane["kept"], **learning}, batch)
            found = {f"norm.{name.removeprefix('seen.')}": value for name, value in seen.items()}
            return {
                **lane,
                "kept": {name: found.get(name, value) for name, value in lane["kept"].items()},
            }

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            theta = {name: lane["w"][name] for name in above}
            personal = {**{k: v for k, v in lane["w"].items() if k in mine}, **lane["kept"]}
            return {"theta": Share(theta, rows), "loss": Share(lane["loss"], rows)}, {
                name: personal[name] for name in mine
            }

        return Client(
            own=mine,
            start=start,
            phases=(Phase(move, steps, unit, batch_size), Phase(look, 1 if kept else 0)),
            finish=finish,
            adapt=(Phase(look),) if kept else (),
        )

    def server(program: Program) -> Server:
        def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            return means["theta"]

        return Server(program.start()[0], update)

    return Method("fedbn", model, delta, client, server)
