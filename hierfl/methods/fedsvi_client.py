"""One round of a client of FedSVI, and the message it receives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, scaled, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.method import Client, Clock, Phase, Share, Up, over_draws, slope
from hierfl.methods.prior_middle import at_prior_middle
from hierfl.optimizers import Optimizer, Stepped, step
from hierfl.program.program import Params, Program, ProgramError

NO_STATE: dict[str, Tree] = {
    "params": {},
    "state": {},
}  # of a client whose guide has no local params


@dataclass(frozen=True)
class Setting:
    """The arguments of `fedsvi`; `global_lr` is the step size of `global_optimizer`."""

    optimizer: Optimizer
    local_optimizer: Optimizer
    local_steps: int
    global_steps: int
    global_lr: float
    batch_size: int | None
    draws: int
    schedule: Literal["constant", "cosine"]
    average: float

    def message(self, params: Params, clock: Clock) -> Tree:
        """Return global params, the factor of step sizes, and 1 if the round is averaged, or 0."""
        late = clock.round + 1 > (1.0 - self.average) * clock.rounds
        return {
            "params": params,
            "rate": torch.tensor(self._rate(clock)),
            "late": torch.tensor(float(self.average == 0.0 or late)),
        }

    def _rate(self, clock: Clock) -> float:
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * clock.round / clock.rounds))

    def averaged(self, mean: Tree, params: Tree, late: Tensor, seen: Tensor) -> Tree:
        """Return the running mean over `seen` rounds; before it begins, the params themselves."""
        if not self.average:
            return params
        weight = torch.where(seen > 0.0, late / seen.clamp(min=1.0), torch.ones(()))
        return lerp(mean, params, weight)

    def kept(self, mine: Params, state: Tree, message: Tree, own: Tree) -> Tree:
        """Return the client state after a round that ends with local params `mine`."""
        if not own["params"]:
            return own
        seen = own["seen"] + message["late"]
        mean = self.averaged(own["mean"], mine, message["late"], seen)
        return {"params": mine, "state": state, "mean": mean, "seen": seen}


def svi_client(program: Program, how: Setting) -> Client:
    """Return the client of one program."""
    if program.reads_all_rows and how.batch_size is not None:
        raise ProgramError(
            f"batch_size is {how.batch_size}, and this guide reads every row of a client at each "
            "step: leave batch_size at None"
        )
    _, mine = program.start()
    local_optimizer, count = how.local_optimizer, program.num_clients

    def loss(at: Tree, batch: ClientBatch) -> Tensor:
        params = {**at["shared"], **at["mine"]}
        return over_draws(
            lambda b: program.terms(params, b).loss(program.share),
            batch,
            how.draws,
            keyed=program.in_vmap,
        )

    def start(message: Tree, own: Tree) -> Tree:
        return {
            "shared": message["params"],
            "mine": own["params"],
            "state": own["state"],
            "gradient": zeros_like(message["params"]),
            "loss": torch.zeros(()),
        }

    def local(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        gradient, _ = slope(
            lambda mine: loss({"shared": work["shared"], "mine": mine}, batch), work["mine"]
        )
        at = Stepped(work["mine"], work["state"])
        params, state = step(local_optimizer, gradient, at, message["rate"])
        return {**work, "mine": params, "state": state}

    def joint(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        at = {"shared": work["shared"], "mine": work["mine"]}
        gradient, value = slope(lambda p: loss(p, batch), at)
        before = Stepped(work["mine"], work["state"])
        params, state = step(local_optimizer, gradient["mine"], before, message["rate"])
        pooled = scaled(gradient["shared"], count)  # this client's estimate of the pooled gradient
        return {
            "shared": tree_map(
                lambda p, g: p - how.global_lr * message["rate"] * g, work["shared"], pooled
            ),
            "mine": params,
            "state": state,
            "gradient": add(work["gradient"], scaled(pooled, 1.0 / how.global_steps)),
            "loss": work["loss"] + value * count / how.global_steps,
        }

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        up = {"gradient": Share(work["gradient"]), "elbo": Share(-work["loss"])}
        return up, how.kept(work["mine"], work["state"], message, own)

    before = Phase(local, how.local_steps if mine else 0, batch_size=how.batch_size)
    alone = Phase(local, max(how.local_steps, 1), batch_size=how.batch_size)

    def new(message: Tree) -> Tree:
        begin = at_prior_middle(program, message["params"])
        return _first_state(begin, local_optimizer)

    return Client(
        own=_first_state(mine, local_optimizer),
        start=start,
        phases=(before, Phase(joint, how.global_steps, batch_size=how.batch_size)),
        finish=finish,
        params=lambda message, own: {**message["params"], **own.get("mean", {})},
        adapt=(alone,) if mine else (),
        new=new if mine else None,
    )


def _first_state(mine: Params, optimizer: Optimizer) -> Tree:
    """Return what a client keeps before its first round."""
    if not mine:
        return NO_STATE
    state = optimizer.init(mine)
    return {"params": mine, "state": state, "mean": mine, "seen": torch.zeros(())}
