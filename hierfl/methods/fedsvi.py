"""FedSVI: stochastic variational inference of any hierarchical program.

The pooled negative ELBO splits as

    L = KL(q(z) || p(z)) + sum_k [ E_q -log p(y_k | w_k, z) + E_q KL(q(w_k | z) || p(w_k | z)) ];

client k holds its own summand and 1/N of the first term. The variational params of z are global:
every client of the cohort returns the gradient of N times its part, and the server takes one
optimizer step along their mean. Those of w_k stay at the client.

Source: SFVI and SFVI-Avg, Hassan, Salomone and Mengersen 2023, arXiv:2302.03314, section 3.
Differences: any model, any reparameterized guide and any optimizers; and with `global_steps` > 1
the mean gradient along the clients' own paths is a pseudo-gradient for the server's optimizer
(Reddi et al. 2021, arXiv:2003.00295) instead of a barycenter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, scaled, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.structured import structured
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.prior_params import at_prior_middle
from hierfl.optimizers import SGD, Adam, Optimizer, Stepped, plain_lr, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Family, Guide, Model

NO_STATE: dict[str, Tree] = {"params": {}, "state": {}}  # without local params of the guide


@About(
    infers=(
        "the posterior of any model, by stochastic variational inference with any "
        "reparameterized guide"
    ),
    source="SFVI: Hassan et al. 2023, arXiv:2302.03314",
    common="any sites and params",
    own="any sites",
    guide="any reparameterized one",
    kept=(
        "local variational params, their mean and the optimizer's state; nothing under "
        "`conditional`, `amortized` and `unrolled`"
    ),
    crosses="a gradient",
    new="fits its local params; none if amortized",
    down="global variational params, two step-size factors",
    up="`gradient`: its gradient in those params; `elbo`: one scalar",
)
def fedsvi(
    model: Model,
    guide: Guide | Family = structured,
    *,
    optimizer: Optimizer = Adam(0.02),  # noqa: B008 (frozen)
    local_optimizer: Optimizer = Adam(0.02),  # noqa: B008 (frozen)
    local_steps: int = 0,
    global_steps: int = 1,
    global_optimizer: Optimizer = SGD(1e-3),  # noqa: B008 (frozen)
    batch_size: int | None = None,
    draws: int = 1,
    schedule: Literal["constant", "cosine"] = "cosine",
    average: float = 0.5,
) -> Method:
    """Return federated SVI of a hierarchical program.

    Args:
        model: any Pyro program over a ClientBatch.
        guide: a family of `hierfl.guides`, or a guide function.
        optimizer: of the server, on the mean gradient of the cohort. Default: our choice, from the
            radon benchmark.
        local_optimizer: of the local params; clients keep its state from round to round.
        local_steps: steps of a round on local params alone, before the joint ones.
        global_steps: steps of a round on local and global params together. One step of all clients
            is one pooled SVI step.
        global_optimizer: of a client's copy of the global params, between the steps of
            `global_steps` > 1: plain SGD, as the server's optimizer takes their mean gradient.
        batch_size: rows of a mini-batch; None: all of a client's rows.
        draws: draws of the guide that each gradient is averaged over.
        schedule: step sizes over the rounds: "constant", or "cosine", falling to 0 on a half
            cosine.
        average: fraction of the rounds, the last ones, over which params are averaged for the
            posterior; 0: the params of the last round.

    Raises:
        ValueError: `average` is outside [0, 1), `global_steps` or `draws` is below 1, or
            `global_optimizer` is not plain SGD.
        ProgramError: (at fit) the guide reads all rows of a client, and `batch_size` is given.
    """
    if not 0.0 <= average < 1.0:
        raise ValueError(
            f"average is {average}: it is a fraction of the rounds, 0 or more and below 1"
        )
    if min(global_steps, draws) < 1:
        raise ValueError(f"global_steps ({global_steps}) and draws ({draws}) must be 1 or more")
    why = "the server steps along the mean gradient of the path"
    how = Setting(
        optimizer=optimizer,
        local_optimizer=local_optimizer,
        local_steps=local_steps,
        global_steps=global_steps,
        global_lr=plain_lr(global_optimizer, "global_optimizer", why),
        batch_size=batch_size,
        draws=draws,
        schedule=schedule,
        average=average,
    )
    parts = partial(_client, how), partial(_server, how)
    return Method("fedsvi", model, guide, *parts, traits=frozenset({"gradients"}))


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


def _client(how: Setting, program: Program) -> Client:
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
    if not mine:
        return NO_STATE
    state = optimizer.init(mine)
    return {"params": mine, "state": state, "mean": mine, "seen": torch.zeros(())}


def _server(how: Setting, program: Program) -> Server:
    """Return the server: a step along the mean gradient, and a running mean of the params."""
    shared, _ = program.start()

    def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
        now = how.message(state["params"], clock)
        at = Stepped(state["params"], state["memory"])
        params, memory = step(how.optimizer, means["gradient"], at, now["rate"])
        seen = state["seen"] + now["late"]
        mean = how.averaged(state["mean"], params, now["late"], seen)
        return {"params": params, "memory": memory, "mean": mean, "seen": seen}

    begin = {"params": shared, "memory": how.optimizer.init(shared), "mean": shared}
    return Server(
        state={**begin, "seen": torch.zeros(())},
        update=update,
        down=lambda state, clock: how.message(state["params"], clock),
        final=lambda state, clock: how.message(state["mean"], clock),
    )
