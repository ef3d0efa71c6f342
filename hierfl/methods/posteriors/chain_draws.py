"""What a server's Langevin chain keeps: its state, and draws spread evenly over the later rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree
from hierfl.method import Clock


@dataclass(frozen=True)
class ChainDraws:
    """The first `burn_in` of the rounds are left out, and `draws` of the states after them kept."""

    burn_in: float
    draws: int

    def start(self, z: Tensor) -> Tree:
        """Return the server's state before the first round."""
        return {"z": z, "points": z.expand(self.draws, -1).clone(), "count": torch.zeros(())}

    def moved(self, state: Tree, z: Tensor, clock: Clock, step_size: float) -> Tree:
        """Return the server's state after a round that led to z; refuse a chain that diverged."""
        if not bool(z.isfinite().all()):
            raise ValueError(
                f"the chain diverged in round {clock.round}: lower step_size ({step_size:g})"
            )
        first = math.ceil(self.burn_in * clock.rounds)
        every = max(1, (clock.rounds - first) // self.draws)
        if clock.round < first or (clock.round - first) % every:
            return {"z": z, "points": state["points"], "count": state["count"]}
        points = state["points"].clone()
        points[int(state["count"]) % self.draws] = z
        return {"z": z, "points": points, "count": state["count"] + 1.0}

    def final(self, state: Tree, clock: Clock) -> Tree:
        """Return the last state and the draws, repeated where the rounds were fewer."""
        count = min(int(state["count"]), self.draws)
        if not count:
            return {"z": state["z"], "points": state["z"].expand(self.draws, -1).clone()}
        return {"z": state["z"], "points": state["points"][torch.arange(self.draws) % count]}


def check_chain(step_size: float, burn_in: float, draws: int, temperature: float) -> None:
    """Refuse options of a chain that are out of range."""
    expect(
        step_size=(step_size, "(0, inf)"),
        burn_in=(burn_in, "[0, 1)"),
        draws=(draws, "[1, inf)"),
        temperature=(temperature, "[0, inf)"),
    )
