"""What many personalised methods share: on each mini-batch, K steps on what is the client's own, one on its copy of the rest.

pFedMe is this with a delta guide, pFedBayes with a mean-field one: the method is in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.averaging_server import averaging_server
from hierfl.optimisers import Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError, Terms


@dataclass(frozen=True)
class Alternating:
    """What tells these methods apart.

    Args:
        loss: (terms, rows of the client) -> (C,), of both kinds of step.
        local: optimiser of the client's own params, started anew each round.
        shared: optimiser of its copy of the global ones, likewise.
        inner: K, steps on own params for each mini-batch.
        steps: R, mini-batches a round.
        batch_size: rows a mini-batch; None: all.
        draws: of the guide, a step.
        restart: (program, global params) -> own params that a round starts from; None: those kept from the last one.
        by_rows: whether the mean of the clients' copies is weighted by their rows.
    """

    loss: Callable[[Terms, Tensor], Tensor]
    local: Optimiser
    shared: Optimiser
    inner: int
    steps: int
    batch_size: int | None
    draws: int = 1
    restart: Callable[[Program, Params], Params] | None = None
    by_rows: bool = False

    def client(self, program: Program) -> Client:
        """The client of one program."""
        above, mine = program.start()
        if not mine or not above:
            raise ProgramError(
                "this method needs local sites, and a learned prior above them: a pyro.param outside the clients plate"
            )

        def loss(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
            def one(b: ClientBatch) -> Tensor:
                return self.loss(program.terms({**theta, **phi}, b), b.counts)

            return over_draws(one, batch, self.draws, keyed=program.keyed)

        def start(message: Tree, own: Tree) -> Tree:
            phi = own["phi"] if self.restart is None else self.restart(program, message)
            return {
                "theta": Stepped(message, self.shared.init(message)),
                "phi": Stepped(phi, self.local.init(phi)),
                "loss": torch.zeros(()),
            }

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            theta, phi = lane["theta"], lane["phi"]
            for k in range(self.inner):
                again = batch.redrawn(k)
                gradient, _ = slope(partial(loss, theta.params, batch=again), phi.params)
                phi = step(self.local, gradient, phi)
            gradient, value = slope(
                lambda p: loss(p, phi.params, batch.redrawn(self.inner)), theta.params
            )
            return {"theta": step(self.shared, gradient, theta), "phi": phi, "loss": value}

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            weight = rows if self.by_rows else 1.0
            up = {"theta": Share(lane["theta"].params, weight), "loss": Share(lane["loss"], weight)}
            return up, {"phi": lane["phi"].params}

        return Client(
            own={"phi": mine},
            start=start,
            phases=(Phase(move, self.steps, batch_size=self.batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **own["phi"]},
        )

    def server(self, program: Program) -> Server:
        """The server of one program: theta <- mean."""
        return averaging_server(program.start()[0])
