"""Alternating steps: per mini-batch, K on local params and one on a copy of the global ones.

A client that joins later takes the K steps alone, at the server's global params. pFedMe is this
with a delta guide, and pFedBayes with a mean-field one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hierfl.core.trees import Tree, chosen
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Phase, Share, Up, over_draws, slope
from hierfl.methods.prior_params import at_prior
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.terms import Terms


@dataclass(frozen=True)
class Alternating:
    """The choices in which these methods differ; both kinds of step descend `loss`."""

    loss: Callable[[Terms, Tensor], Tensor]  # of terms and numbers of rows, (C,)
    local: Optimizer  # of the local params, restarted in each round
    shared: Optimizer  # of the client's copy of the global params, likewise
    inner: int  # K, steps on local params for each mini-batch
    steps: int  # R, mini-batches of a round
    batch_size: int | None
    draws: int = 1  # S, of the guide, that each gradient is averaged over
    begin: Callable[[Program, Params], Params] = at_prior  # before a client's first round
    restarts: bool = False  # whether every round begins so

    def client(self, program: Program) -> Client:
        """Return the client of one program."""
        above, mine = program.start()
        if not mine or not above:
            raise ProgramError(
                "this method needs local sites, and a learned prior above them: a pyro.param "
                "outside the clients plate"
            )

        def loss(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
            def one(b: ClientBatch) -> Tensor:
                return self.loss(program.terms({**theta, **phi}, b), b.counts)

            return over_draws(one, batch, self.draws, keyed=program.in_vmap)

        self.begin(program, above)  # refuses a guide that cannot start there before the first round

        def served(message: Tree, own: Tree) -> Params:
            return chosen(own["seen"], own["phi"], self.begin(program, message))

        def start(message: Tree, own: Tree) -> Tree:
            phi = self.begin(program, message) if self.restarts else served(message, own)
            return {
                "theta": Stepped(message, self.shared.init(message)),
                "phi": Stepped(phi, self.local.init(phi)),
                "loss": torch.zeros(()),
            }

        def inner(theta: Params, phi: Stepped, batch: ClientBatch) -> tuple[Stepped, Tensor]:
            value = torch.zeros(())
            for k in range(self.inner):
                gradient, value = slope(partial(loss, theta, batch=batch.redrawn(k)), phi.params)
                phi = step(self.local, gradient, phi)
            return phi, value

        def tune(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            phi, value = inner(message, work["phi"], batch)
            return {**work, "phi": phi, "loss": value}

        def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            theta = work["theta"]
            phi, _ = inner(theta.params, work["phi"], batch)
            gradient, value = slope(
                lambda p: loss(p, phi.params, batch.redrawn(self.inner)), theta.params
            )
            return {"theta": step(self.shared, gradient, theta), "phi": phi, "loss": value}

        def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up = {"theta": Share(work["theta"].params), "loss": Share(work["loss"])}
            return up, {"phi": work["phi"].params, "seen": torch.ones(())}

        return Client(
            own={"phi": mine, "seen": torch.zeros(())},
            start=start,
            phases=(Phase(move, self.steps, batch_size=self.batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **served(message, own)},
            adapt=(Phase(tune, self.steps, batch_size=self.batch_size),),
            seen=lambda own: own["seen"],
        )
