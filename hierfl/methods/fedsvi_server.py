"""The server of FedSVI."""

from __future__ import annotations

import torch

from hierfl.core.trees import Tree
from hierfl.method import Clock, Server
from hierfl.methods.fedsvi_client import Setting
from hierfl.optimizers import Stepped, step
from hierfl.program.program import Program


def svi_server(program: Program, how: Setting) -> Server:
    """Return the server: a step along the mean gradient, and a running mean of the params."""
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
