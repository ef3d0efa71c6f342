"""The server of FedSVI, and its round as one step of the pooled program."""

from __future__ import annotations

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Clock, Pooled, Server, over_draws, slope
from hierfl.methods.fedsvi_client import Setting
from hierfl.optimizers import Stepped, step
from hierfl.program.program import Program
from hierfl.program.stacking import stacked


def svi_server(program: Program, how: Setting) -> Server:
    """Return the server of one program: a step along the mean gradient, and a running mean of the params."""
    shared, _ = program.start()

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        now = how.message(state["params"], clock)
        at = Stepped(state["params"], state["memory"])
        params, memory = step(how.optimizer, means["gradient"], at, now["rate"])
        seen = state["seen"] + now["late"]
        mean = how.averaged(state["mean"], params, now["late"], seen)
        return {"params": params, "memory": memory, "mean": mean, "seen": seen}

    start = {
        "params": shared,
        "memory": how.optimizer.init(shared),
        "mean": shared,
        "seen": torch.zeros(()),
    }
    return Server(
        state=start,
        update=update,
        down=lambda state, clock: how.message(state["params"], clock),
        final=lambda state, clock: how.message(state["mean"], clock),
    )


def svi_pooled(program: Program, how: Setting) -> Pooled:
    """Return a round as one step of the pooled program.

    Raises:
        ValueError: a round is more than one joint step.
    """
    if (how.local_steps, how.global_steps) != (0, 1):
        raise ValueError(
            f"the pooled engine takes one joint step a round: local_steps is {how.local_steps} and "
            f"must be 0, "
            f"global_steps is {how.global_steps} and must be 1"
        )
    update = svi_server(program, how).update

    def move(
        state: Tree, table: Tree, batch: ClientBatch, clock: Clock
    ) -> tuple[Tree, Tree, dict[str, float]]:
        message = how.message(state["params"], clock)

        def loss(at: Tree) -> Tensor:
            def one(b: ClientBatch) -> Tensor:
                terms = program.terms({**at["shared"], **stacked(program, at["mine"])}, b)
                return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl

            return over_draws(one, batch, how.num_particles, keyed=program.in_vmap)

        gradient, value = slope(loss, {"shared": state["params"], "mine": table["params"]})

        def keep(own: Tree, of_own: Tree) -> Tree:
            at = Stepped(own["params"], own["state"])
            params, memory = step(how.local_optimizer, of_own, at, message["rate"])
            return how.kept(params, memory, message, own)

        rows = torch.vmap(keep)(table, gradient["mine"]) if table["params"] else table
        new = update(state, {"gradient": gradient["shared"]}, clock)
        return new, rows, {"elbo": -float(value)}

    return move
