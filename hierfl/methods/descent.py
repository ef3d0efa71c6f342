"""Optimizer steps on a copy of the global params, for methods without latent sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.method import Phase, slope
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program

Loss = Callable[[Params, Tree, Tree, ClientBatch], Tensor]


@dataclass(frozen=True)
class Descent:
    """How a client descends in one round; the optimizer is restarted in each."""

    optimizer: Optimizer
    steps: int
    unit: Literal["step", "epoch"]
    batch_size: int | None

    def begin(self, w: Params) -> Tree:
        """Return a working state at params w: `w`, the optimizer's `state`, and the last `loss`."""
        return {"w": w, "state": self.optimizer.init(w), "loss": torch.zeros(())}

    def phase(self, loss: Loss) -> Phase:
        """Return steps down a loss: (w, working state, message, mini-batch) -> ()."""

        def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, value = slope(lambda w: loss(w, work, message, batch), work["w"])
            w, state = step(self.optimizer, gradient, Stepped(work["w"], work["state"]))
            return {**work, "w": w, "state": state, "loss": value}

        return Phase(move, self.steps, self.unit, self.batch_size)

    def on_likelihood(self, program: Program) -> Phase:
        """Return steps down the mean negative log likelihood of a row, and nothing else."""
        return self.phase(lambda w, work, message, batch: program.mean_loss(w, batch))
