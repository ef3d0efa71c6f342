"""FedAvg, and FedProx with a pull towards the global model.

    client:  w <- theta;  for every mini-batch:  w <- w - lr grad[ nll(w) + prox/2 |w - theta|^2 ]
    server:  theta <- (1 - beta) theta + beta sum_k (n_k / n) w_k

Sources: McMahan et al. 2017, arXiv:1602.05629, Algorithm 1; the pull: Li et al. 2020, arXiv:1812.06127, Eq. (2); beta = 2 is the
"+AM" of Shi et al. 2023, arXiv:2310.09183, appendix C.4.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, lerp, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, half_square, slope
from hierfl.optimisers import SGD, Optimiser, Stepped, step
from hierfl.program.program import Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model


@recorded
def fedavg(
    model: Model,
    *,
    optimiser: Optimiser = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
    prox: float = 0.0,
    beta: float = 1.0,
    fine_tune: bool = False,
) -> Method:
    """FedAvg of a program whose params are all global (`hierfl.models.network`, say).

    Args:
        model: a program with global params and no latent sites; the loss is the mean negative log likelihood of a row.
        optimiser: of the client, started anew each round.
        steps: mini-batches a round, or passes over the rows (`unit`); 20 mini-batches of 20 rows at 0.01: PRIOR's setting.
        unit: "step" or "epoch".
        batch_size: rows a mini-batch; None: all.
        prox: mu of FedProx; 0: FedAvg.
        beta: over-relaxation of the server.
        fine_tune: "+FT": a client keeps weights of its own, to be served by: theta until `fit.personalise(rows, rounds=e)` has
            taken e passes over its rows (or times `steps` mini-batches) from there, by the same optimiser and without a pull.

    Raises:
        ProgramError: the model has latent sites or local params.
    """

    def client(program: Program) -> Client:
        _, own = program.start()
        if own or program.latents.sites:
            raise ProgramError(
                "fedavg fits global params alone; for sites and local params take fedsvi or a personalised method"
            )

        def start(message: Tree, own: Tree) -> Tree:
            lane = {"theta": message, "state": optimiser.init(message), "loss": torch.zeros(())}
            return (
                {**lane, "tuned": tuned(message, own), "seen": own["seen"]} if fine_tune else lane
            )

        def tuned(message: Tree, own: Tree) -> Tree:
            return (
                tree_map(lambda w, new: torch.where(own["seen"] > 0.0, w, new), own["w"], message)
                if fine_tune
                else message
            )

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            def loss(theta: Tree) -> Tensor:
                nll = program.mean_loss(theta, batch)
                return nll + prox * half_square(theta, message) if prox else nll

            gradient, value = slope(loss, lane["theta"])
            theta, state = step(optimiser, gradient, Stepped(lane["theta"], lane["state"]))
            return {**lane, "theta": theta, "state": state, "loss": value}

        def tune(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, value = slope(lambda w: program.mean_loss(w, batch), lane["tuned"])
            w, state = step(optimiser, gradient, Stepped(lane["tuned"], lane["state"]))
            return {**lane, "tuned": w, "state": state, "loss": value, "seen": torch.ones(())}

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up = {"theta": Share(lane["theta"], rows), "loss": Share(lane["loss"], rows)}
            return up, {"w": lane["tuned"], "seen": lane["seen"]} if fine_tune else own

        kept = {"w": program.start()[0], "seen": torch.zeros(())} if fine_tune else {}
        again = Phase(tune, 1 if unit == "epoch" else steps, unit, batch_size)
        return Client(
            kept,
            start,
            (Phase(move, steps, unit, batch_size),),
            finish,
            tuned,
            (again,) if fine_tune else None,
        )

    def server(program: Program) -> Server:
        def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            return lerp(theta, means["theta"], beta)

        return Server(program.start()[0], update)

    return Method("fedprox" if prox else "fedavg", model, delta, client, server)
