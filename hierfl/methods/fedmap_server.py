"""FedMAP's server: from sums of the clients' weights, and of slopes of their priors, to the next prior."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, tree_map
from hierfl.method import Clock, Server
from hierfl.optimisers import Optimiser, Stepped, step
from hierfl.program.program import Params, Program

Best = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]
Omega = Literal["size", "uniform", "mean-likelihood", "likelihood"]
Rule = Literal["average", "gradient"] | Best


def map_server(
    program: Program, *, rule: Rule, optimiser: Optimiser, omega: Omega, alone: bool
) -> Server:
    """The server of one program.

    Its means of `clients` are weighted by omega: `away` from theta, its `square`, and the `slope` of -log prior.

    Args:
        program: the program.
        rule: how gamma follows from those means, as in `fedmap`.
        optimiser: of gradient steps.
        omega: the kind of weights; those of likelihoods may lie on one client, which is told.
        alone: the first round's mean is of one client that has fitted alone, where gamma begins.
    """
    above = program.start()[0]

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        found, gamma, memory = means["clients"], state["gamma"], state["memory"]
        first = bool(state["alone"] > 0.0)
        if (
            omega.endswith("likelihood")
            and clock.clients > 1
            and not first
            and float(means["effective_clients"]) < 1.5
        ):
            warnings.warn(
                "fedmap: omega lies on one client, the others hardly count: take omega='size'",
                stacklevel=2,
            )
        averaged = {name: gamma[name] + away for name, away in found.get("away", {}).items()}
        if first:
            gamma = {**gamma, **averaged}
        elif callable(rule):
            gamma = {**gamma, **_best(rule, gamma, found)}
        else:
            slopes = {**tree_map(torch.zeros_like, gamma), **found["slope"]}
            gamma, memory = step(optimiser, slopes, Stepped(gamma, memory))
            gamma = {**gamma, **averaged} if rule == "average" else gamma
        return {"gamma": gamma, "memory": memory, "alone": torch.zeros(())}

    return Server(
        state={
            "gamma": above,
            "memory": optimiser.init(above),
            "alone": torch.tensor(float(alone)),
        },
        update=update,
        down=lambda state, clock: {"gamma": state["gamma"], "alone": state["alone"]},
    )


def _best(best: Best, gamma: Params, found: Tree) -> Params:
    """A prior's exact step, tensor by tensor: the params of a tensor are all `<part>.<tensor>`, one of them theta."""
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
