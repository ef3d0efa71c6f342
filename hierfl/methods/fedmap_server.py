"""The server of FedMAP: the next prior, from weighted means of weights and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.method import Clock, Server
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program

Best = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
Weights = Literal["rows", "uniform", "mean-likelihood", "likelihood"]
Rule = Literal["average", "gradient"] | Best


def map_server(
    program: Program, *, rule: Rule, optimizer: Optimizer, weights: Weights, alone: bool
) -> Server:
    """Return the server of one program.

    The share `clients` arrives as means weighted by omega: `away`, the clients' weights minus
    theta; its `square`; and `slope`, the gradient of -log prior in the global params.
    """
    above = program.start()[0]

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        found, gamma, memory = means["clients"], state["gamma"], state["memory"]
        first = bool(state["alone"] > 0.0)
        if (
            weights.endswith("likelihood")
            and clock.clients > 1
            and not first
            and float(means["effective_clients"]) < 1.5
        ):
            warnings.warn(
                "fedmap: nearly all weight lies on one client, the others hardly count: take "
                "weights='rows'",
                stacklevel=2,
            )
        averaged = {name: gamma[name] + away for name, away in found.get("away", {}).items()}
        if first:
            gamma = {**gamma, **averaged}
        elif callable(rule):
            gamma = {**gamma, **_best(rule, gamma, found)}
        else:
            slopes = {**tree_map(torch.zeros_like, gamma), **found["slope"]}
            gamma, memory = step(optimizer, slopes, Stepped(gamma, memory))
            gamma = {**gamma, **averaged} if rule == "average" else gamma
        return {"gamma": gamma, "memory": memory, "alone": torch.zeros(())}

    return Server(
        state={
            "gamma": above,
            "memory": optimizer.init(above),
            "alone": torch.tensor(float(alone)),
        },
        update=update,
        down=lambda state, clock: {"gamma": state["gamma"], "alone": state["alone"]},
    )


def _best(best: Best, gamma: Params, found: Tree) -> Params:
    """Return global params after a prior's exact step; those of one tensor are `<part>.<tensor>`."""
    new: Params = {}
    for theta, away in found["away"].items():
        tensor = theta.removeprefix("theta.")
        mine = {
            name.partition(".")[0]: value
            for name, value in gamma.items()
            if name.partition(".")[2] == tensor
        }
        spread = (found["square"][theta] - away.square()).clamp(min=0.0)
        new |= {
            f"{part}.{tensor}": value
            for part, value in best(mine, mine["theta"] + away, spread).items()
        }
    return new
