"""Ditto: a personal model pulled toward FedAvg's; and, without the pull, each client alone.

    client:  v <- theta in its first round, later its last v;
             for every mini-batch:  v <- v - lr grad[ nll(v) + prox/2 |v - theta|^2 ]
             w <- theta;  for every mini-batch:  w <- w - lr grad nll(w)                  as in FedAvg
    server:  theta <- sum_k (n_k / n) w_k

Source: Li et al. 2021, arXiv:2012.04221, Algorithm 1. Both use the theta received, so that their
order does not matter. The paper does not say where v starts: here a client that has been in no
round, or joins later, is at theta. As a model: v_k ~ Normal(theta, 1 / prox), with theta plugged in
from FedAvg, not learned from the v_k.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, chosen
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.averaging import half_square
from hierfl.optimizers import SGD, Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model


@About(
    infers="a personal model held near FedAvg's",
    source="Li et al. 2021, arXiv:2012.04221",
    common="weights",
    own="weights near them",
    kept="its personal weights",
    crosses="its copy of the common ones",
    new="fits its weights",
    up="`theta`*: its copy of the common weights after training; `loss`*",
)
def ditto(
    model: Model,
    *,
    prox: float = 1.0,
    optimizer: Optimizer = SGD(0.05),  # noqa: B008 (frozen)
    steps: int = 2,
    personal_steps: int | None = None,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 16,
) -> Method:
    """Return Ditto of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites; the loss is the mean negative log
            likelihood of a row.
        prox: pull of the personal model to the common one, lambda in the paper; 0: each client
            alone. Defaults: the authors' for Fashion-MNIST (that of their code is 0).
        optimizer: of both models, restarted in each round.
        steps: mini-batches of a round for the common model, or passes over the rows (`unit`).
        personal_steps: the same for the personal model; None: `steps`.
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """
    return _alongside(
        "ditto",
        model,
        prox,
        optimizer,
        (steps if personal_steps is None else personal_steps, steps),
        unit,
        batch_size,
    )


@About(
    infers="each client alone",
    common="none",
    own="weights",
    kept="its weights",
    crosses="its loss",
    new="fits its weights",
    down="the starting weights",
    up="`loss`*",
)
def local_only(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.05),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
) -> Method:
    """Return the baseline in which every client fits alone, from the module's weights.

    Args:
        model: as in `ditto`.
        optimizer: restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """
    return _alongside("local_only", model, 0.0, optimizer, (steps, 0), unit, batch_size)


def _alongside(
    name: str,
    model: Model,
    prox: float,
    optimizer: Optimizer,
    counts: tuple[int, int],
    unit: Literal["step", "epoch"],
    batch_size: int | None,
) -> Method:
    def client(program: Program) -> Client:
        above, own = program.start()
        if own or program.latents.sites:
            raise ProgramError(
                f"{name} fits global params only, and a copy of them for each client; this model "
                "has latent sites or local params: take models.network"
            )

        def params(message: Tree, own: Tree) -> Params:
            return chosen(own["seen"], own["theta"], message)

        def start(message: Tree, own: Tree) -> Tree:
            fresh = {"theta": message, "state": optimizer.init(message), "loss": torch.zeros(())}
            return {"mine": {**fresh, "theta": params(message, own)}, "ours": fresh}

        def move(at: Tree, center: Tree | None, batch: ClientBatch) -> Tree:
            def loss(theta: Tree) -> Tensor:
                nll = program.mean_loss(theta, batch)
                return nll if center is None else nll + prox * half_square(theta, center)

            gradient, value = slope(loss, at["theta"])
            theta, state = step(optimizer, gradient, Stepped(at["theta"], at["state"]))
            return {"theta": theta, "state": state, "loss": value}

        def personal(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return {**work, "mine": move(work["mine"], message if prox else None, batch)}

        def common(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return {**work, "ours": move(work["ours"], None, batch)}

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            mine, ours = work["mine"], work["ours"]
            up = {
                "loss": Share(mine["loss"], rows),
                **({"theta": Share(ours["theta"], rows)} if counts[1] else {}),
            }
            return up, {"theta": mine["theta"], "seen": torch.ones(())}

        # the common model comes first: in phase 0 its mini-batches are those of fedavg
        kinds = (
            (common, counts[1]),
            (personal, counts[0]),
        )
        phases = tuple(Phase(kind, count, unit, batch_size) for kind, count in kinds)
        return Client(
            own={"theta": above, "seen": torch.zeros(())},
            start=start,
            phases=phases,
            finish=finish,
            params=params,
            adapt=phases[1:],
            seen=lambda own: own["seen"],
        )

    def server(program: Program) -> Server:
        def update(theta: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            return means.get("theta", theta)

        return Server(program.start()[0], update)

    return Method(name, model, delta, client, server)
