"""FedSVI: stochastic variational inference of any hierarchical program, the clients' terms of the ELBO apart.

The pooled negative ELBO splits as

    L = KL(q(z) || p(z)) + sum_k [ E_q -log p(y_k | w_k, z) + E_q KL(q(w_k | z) || p(w_k | z)) ];

client k holds its own summand and 1/N of the first term. The variational params of z are global: every client of the cohort
returns the gradient of N times its part, and the server takes one optimiser step along their mean. Those of w_k stay put.

Source: SFVI and SFVI-Avg, Hassan, Salomone and Mengersen 2023, arXiv:2302.03314, section 3. Difference: any model and any
reparameterised guide, any optimisers, and with `global_steps` > 1 the mean gradient along the clients' own paths is a
pseudo-gradient for the server's optimiser (Reddi et al. 2021, arXiv:2003.00295) instead of a barycentre.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hierfl.core.trees import Tree, add, lerp, scaled, tree_map, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.structured import structured
from hierfl.method import Client, Clock, Method, Phase, Pooled, Server, Share, Up, over_draws, slope
from hierfl.optimisers import Adam, Optimiser, Stepped, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Family, Guide, Model
from hierfl.program.stacking import stacked

NOTHING: dict[str, Tree] = {
    "params": {},
    "state": {},
}  # what a client keeps where the guide has no local params


@recorded
def fedsvi(
    model: Model,
    guide: Guide | Family = structured,
    *,
    optimiser: Optimiser = Adam(0.02),  # noqa: B008 (frozen)
    local_optimiser: Optimiser = Adam(0.02),  # noqa: B008 (frozen)
    local_steps: int = 0,
    global_steps: int = 1,
    client_lr: float = 1e-3,
    batch_size: int | None = None,
    num_particles: int = 1,
    schedule: Literal["constant", "cosine"] = "cosine",
    average: float = 0.5,
) -> Method:
    """Federated SVI of a hierarchical program.

    Args:
        model: any Pyro program over a ClientBatch.
        guide: a family of `hierfl.guides`, or a guide function.
        optimiser: of the server, on the mean gradient of the cohort (default: our choice, from the radon benchmark).
        local_optimiser: of what a client keeps to itself; its state is kept too.
        local_steps: steps a round on local params alone, before the joint ones.
        global_steps: steps a round on local and global params together; one step of all clients is one pooled SVI step.
        client_lr: step size of a client's copy of the global params, used between the steps of `global_steps` > 1.
        batch_size: rows a step; None: all of a client's rows.
        num_particles: draws of the guide that each gradient is averaged over.
        schedule: step sizes over the rounds: constant, or falling to 0 on a half cosine.
        average: share of the rounds, the last ones, over which params are averaged for the posterior; 0: the last round's.

    Raises:
        ValueError: a share outside [0, 1), or counts below 1.
    """
    if not 0.0 <= average < 1.0:
        raise ValueError(f"average is {average}: it is the share of the last rounds, in [0, 1)")
    if min(global_steps, num_particles) < 1:
        raise ValueError(
            f"global_steps ({global_steps}) and num_particles ({num_particles}) must be 1 or more"
        )

    def rate(clock: Clock) -> float:
        return (
            1.0
            if schedule == "constant"
            else 0.5 * (1.0 + math.cos(math.pi * clock.round / clock.rounds))
        )

    def down(params: Params, clock: Clock) -> Tree:
        late = clock.round + 1 > (1.0 - average) * clock.rounds
        return {
            "params": params,
            "rate": torch.tensor(rate(clock)),
            "late": torch.tensor(float(average == 0.0 or late)),
        }

    def weight(
        late: Tensor, seen: Tensor
    ) -> Tensor:  # until the mean begins, it is the params as they are
        return torch.where(seen > 0.0, late / seen.clamp(min=1.0), torch.ones(()))

    def kept(lane: Tree, message: Tree, own: Tree) -> Tree:
        if not own["params"]:
            return own
        seen = own["seen"] + message["late"]
        mean = (
            lerp(own["mean"], lane["mine"], weight(message["late"], seen))
            if average
            else lane["mine"]
        )
        return {"params": lane["mine"], "state": lane["state"], "mean": mean, "seen": seen}

    def client(program: Program) -> Client:
        if program.reads_all_rows and batch_size is not None:
            raise ProgramError(
                "this guide reads every row of a client at each step: leave batch_size at None"
            )
        _, mine = program.start()

        def loss(at: Tree, batch: ClientBatch) -> Tensor:
            params = {**at["shared"], **at["mine"]}
            return over_draws(
                lambda b: program.terms(params, b).loss(program.share),
                batch,
                num_particles,
                keyed=program.keyed,
            )

        def start(message: Tree, own: Tree) -> Tree:
            return {
                "shared": message["params"],
                "mine": own["params"],
                "state": own["state"],
                "gradient": zeros_like(message["params"]),
                "loss": torch.zeros(()),
            }

        def local(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            gradient, _ = slope(
                lambda mine: loss({"shared": lane["shared"], "mine": mine}, batch), lane["mine"]
            )
            params, state = step(
                local_optimiser, gradient, Stepped(lane["mine"], lane["state"]), message["rate"]
            )
            return {**lane, "mine": params, "state": state}

        def joint(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            at = {"shared": lane["shared"], "mine": lane["mine"]}
            gradient, value = slope(lambda p: loss(p, batch), at)
            params, state = step(
                local_optimiser,
                gradient["mine"],
                Stepped(lane["mine"], lane["state"]),
                message["rate"],
            )
            pooled = scaled(
                gradient["shared"], program.num_clients
            )  # this client's estimate of the pooled gradient
            return {
                "shared": tree_map(
                    lambda p, g: p - client_lr * message["rate"] * g, lane["shared"], pooled
                ),
                "mine": params,
                "state": state,
                "gradient": add(lane["gradient"], scaled(pooled, 1.0 / global_steps)),
                "loss": lane["loss"] + value * program.num_clients / global_steps,
            }

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up = {"gradient": Share(lane["gradient"]), "elbo": Share(-lane["loss"])}
            return up, kept(lane, message, own)

        def params(message: Tree, own: Tree) -> Params:
            return {**message["params"], **own.get("mean", {})}

        alone = Phase(local, count=max(local_steps, 1) if mine else 0, batch_size=batch_size)
        before = Phase(local, count=local_steps if mine else 0, batch_size=batch_size)
        own = (
            {
                "params": mine,
                "state": local_optimiser.init(mine),
                "mean": mine,
                "seen": torch.zeros(()),
            }
            if mine
            else NOTHING
        )
        return Client(
            own=own,
            start=start,
            phases=(before, Phase(joint, count=global_steps, batch_size=batch_size)),
            finish=finish,
            params=params,
            adapt=(alone,) if mine else (),
        )

    def server(program: Program) -> Server:
        shared, _ = program.start()

        def update(state: Tree, means: dict[str, Tree], clock: Clock) -> Tree:
            now = down(state["params"], clock)
            params, memory = step(
                optimiser, means["gradient"], Stepped(state["params"], state["memory"]), now["rate"]
            )
            seen = state["seen"] + now["late"]
            mean = lerp(state["mean"], params, weight(now["late"], seen)) if average else params
            return {"params": params, "memory": memory, "mean": mean, "seen": seen}

        start = {
            "params": shared,
            "memory": optimiser.init(shared),
            "mean": shared,
            "seen": torch.zeros(()),
        }
        return Server(
            state=start,
            update=update,
            down=lambda state, clock: down(state["params"], clock),
            final=lambda state, clock: down(state["mean"], clock),
        )

    def pooled(program: Program) -> Pooled:
        if (local_steps, global_steps) != (0, 1):
            raise ValueError(
                "the pooled engine takes one joint step a round: local_steps=0, global_steps=1"
            )
        update = server(program).update

        def move(
            state: Tree, table: Tree, batch: ClientBatch, clock: Clock
        ) -> tuple[Tree, Tree, dict[str, float]]:
            rate = down(state["params"], clock)

            def loss(at: Tree) -> Tensor:
                def one(b: ClientBatch) -> Tensor:
                    terms = program.terms({**at["shared"], **stacked(program, at["mine"])}, b)
                    return terms.nll.sum() + terms.local_kl.sum() + terms.global_kl

                return over_draws(one, batch, num_particles, keyed=program.keyed)

            gradient, value = slope(loss, {"shared": state["params"], "mine": table["params"]})

            def keep(own: Tree, of_own: Tree) -> Tree:
                params, memory = step(
                    local_optimiser, of_own, Stepped(own["params"], own["state"]), rate["rate"]
                )
                return kept({"mine": params, "state": memory}, rate, own)

            rows = torch.vmap(keep)(table, gradient["mine"]) if table["params"] else table
            return (
                update(state, {"gradient": gradient["shared"]}, clock),
                rows,
                {"elbo": -float(value)},
            )

        return move

    return Method("fedsvi", model, guide, client, server, pooled)
