"""FedSVI: stochastic variational inference of any hierarchical program.

The pooled negative ELBO splits as

    L = KL(q(z) || p(z)) + sum_k [ E_q -log p(y_k | w_k, z) + E_q KL(q(w_k | z) || p(w_k | z)) ];

client k holds its own summand and 1/N of the first term. The variational params of z are global:
every client of the cohort returns the gradient of N times its part, and the server takes one
optimizer step along their mean. Those of w_k stay at the client.

With `merge` it is SFVI-Avg: each client fits a copy of what is global for `global_steps` steps as if
all N clients were like it, and the server averages the copies:

    client:  q_k <- steps down  KL(q(z) || p(z)) + N [ E_q -log p(y_k | w_k, z) + E_q KL(w_k) ]
    server:  q <- the Gaussian of the mean natural parameters,     P = mean P_k,  P m = mean P_k m_k
             or the Wasserstein barycenter of independent ones,    m = mean m_k,  s = mean s_k

With means of natural parameters the fixed point is exact where all is Gaussian, for the prior
counts once: mean (P_0 + N A_k) = P_0 + sum A_k. The paper's barycenter only comes near it.

Source: SFVI and SFVI-Avg, Hassan, Salomone and Mengersen 2023, arXiv:2302.03314, section 3.
Differences: any model, any reparameterized guide and any optimizers; without `merge`, and with
`global_steps` > 1, the mean gradient along the clients' own paths is a pseudo-gradient for the
server's optimizer (Reddi et al. 2021, arXiv:2003.00295) instead of a barycenter; clients count as
the same share of all rows; and `merge="natural"` is hierfl's.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, add, lerp, scaled, zeros_like
from hierfl.data.batch import ClientBatch
from hierfl.guides.structured import structured
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import TwoLevels
from hierfl.methods.parts.prior_params import at_prior_middle
from hierfl.methods.posteriors.merging import MERGES, Merge, averaged_by
from hierfl.optimizers import SGD, Adam, Optimizer, Stepped, plain_lr, step
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Family, Guide, Model


class FedSVIState(NamedTuple):
    """What a client keeps of local params, or the server of global ones, and their mean over `seen` last rounds, ()."""

    at: Stepped
    mean: Params
    seen: Tensor


class FedSVIRounds(NamedTuple):
    """Which step sizes rounds have, and over which of them params are averaged, as arguments of `fedsvi`."""

    schedule: Literal["constant", "cosine"]
    average: float

    def message(self, params: Params, clock: Clock) -> Tree:
        """Return global params, the factor of step sizes, and 1 if the round is averaged, or 0."""
        falls = self.schedule != "constant"
        rate = 0.5 * (1.0 + math.cos(math.pi * clock.round / clock.rounds)) if falls else 1.0
        late = clock.round + 1 > (1.0 - self.average) * clock.rounds
        return {
            "params": params,
            "rate": torch.tensor(rate),
            "late": torch.tensor(float(self.average == 0.0 or late)),
        }

    def moved(self, before: FedSVIState, at: Stepped, late: Tensor) -> FedSVIState:
        """Return the state after a round that ends `at`; before means begin, they are the params."""
        seen = before.seen + late
        if not self.average:
            return FedSVIState(at, at.params, seen)
        weight = torch.where(seen > 0.0, late / seen.clamp(min=1.0), torch.ones(()))
        return FedSVIState(at, lerp(before.mean, at.params, weight), seen)


@About(
    infers=(
        "the posterior of any model, by stochastic variational inference with any "
        "reparameterized guide; SFVI-Avg with `merge=`"
    ),
    source="SFVI: Hassan et al. 2023, arXiv:2302.03314",
    common="any sites and params",
    own="any sites",
    guide="any reparameterized one",
    kept=(
        "local variational params, their mean and the optimizer's state; nothing under "
        "`conditional` and `amortized`"
    ),
    new="fits its local params; none if amortized",
    down="global variational params, two step-size factors",
    up="`gradient`: its gradient in those params (with `merge=` its copy of them); `elbo`: one scalar",
)
def fedsvi(
    model: Model,
    guide: Guide | Family = structured,
    *,
    optimizer: Optimizer = Adam(0.02),  # noqa: B008 (frozen)
    local_optimizer: Optimizer = Adam(0.02),  # noqa: B008 (frozen)
    local_steps: int = 0,
    global_steps: int = 1,
    global_optimizer: Optimizer | None = None,
    batch_size: int | None = None,
    draws: int = 1,
    schedule: Literal["constant", "cosine"] = "cosine",
    average: float = 0.5,
    merge: Merge = "gradient",
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
            `global_steps` > 1: plain SGD, as the server's optimizer takes their mean gradient. With
            `merge` any, restarted in each round. None: SGD(1e-3), or with `merge` Adam(0.02).
        batch_size: rows of a mini-batch; None: all of a client's rows.
        draws: draws of the guide that each gradient is averaged over.
        schedule: step sizes over the rounds: "constant", or "cosine", falling to 0 on a half
            cosine.
        average: fraction of the rounds, the last ones, over which params are averaged for the
            posterior; 0: the params of the last round.
        merge: what the server does. "gradient": a step of `optimizer`. "natural" and "wasserstein"
            (SFVI-Avg): it averages the copies that clients have fitted in `global_steps` steps, 20
            to 100, and `optimizer` is unused; fewer rounds, with more work in each.

    Raises:
        ValueError: `average` is outside [0, 1), `global_steps` or `draws` is below 1,
            `merge` is none of these words, or without it `global_optimizer` is not plain SGD.
        ProgramError: (at fit) the guide reads all rows of a client, and `batch_size` is given; or
            `merge` is given, and the posterior of the global sites is no Gaussian, or for
            "wasserstein" one with correlations.
    """
    expect(
        average=(average, "[0, 1)"),
        global_steps=(global_steps, "[1, inf)"),
        draws=(draws, "[1, inf)"),
        merge=(merge, MERGES),
    )
    steps_along = merge == "gradient"  # the server, along the mean gradient of the path
    if steps_along and global_optimizer is not None:
        why = "the server steps along the mean gradient of the path"
        plain_lr(global_optimizer, "global_optimizer", why)
    copy_optimizer = global_optimizer or (SGD(1e-3) if steps_along else Adam(0.02))
    rounds = FedSVIRounds(schedule, average)

    def client(program: Program) -> Client:
        if program.reads_all_rows and batch_size is not None:
            raise ProgramError(
                f"batch_size is {batch_size}, and this guide reads every row of a client at each "
                "step: leave batch_size at None"
            )
        _, mine = program.start()
        count, merging = program.num_clients, averaged_by(program, merge)

        def loss(at: Tree, batch: ClientBatch) -> Tensor:
            params = {**at["shared"], **at["mine"]}
            return over_draws(
                lambda b: program.terms(params, b).loss(program.share),
                batch,
                draws,
                keyed=program.in_vmap,
            )

        def start(message: Tree, own: FedSVIState) -> TwoLevels:
            params = message["params"]
            shared = Stepped(params, copy_optimizer.init(params))
            at = own.at if mine else Stepped({}, {})
            return TwoLevels(shared, at, torch.zeros(()), zeros_like(params))  # the mean gradient

        def local(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            gradient, _ = slope(
                lambda mine: loss({"shared": work.theta.params, "mine": mine}, batch),
                work.phi.params,
            )
            return work._replace(phi=step(local_optimizer, gradient, work.phi, message["rate"]))

        def joint(work: TwoLevels, message: Tree, batch: ClientBatch) -> TwoLevels:
            at = {"shared": work.theta.params, "mine": work.phi.params}
            gradient, value = slope(lambda p: loss(p, batch), at)
            # this client's estimate of the pooled gradient
            pooled = scaled(gradient["shared"], count)
            return TwoLevels(
                step(copy_optimizer, pooled, work.theta, message["rate"]),
                step(local_optimizer, gradient["mine"], work.phi, message["rate"]),
                work.loss + value * count / global_steps,
                add(work.beside, scaled(pooled, 1.0 / global_steps)),
            )

        def finish(
            work: TwoLevels, message: Tree, own: FedSVIState, rows: Tensor
        ) -> tuple[Up, FedSVIState]:
            if merging is None:
                up = {"gradient": Share(work.beside)}
            else:
                up = {"copy": Share(merging.sent(work.theta.params))}
            up["elbo"] = Share(-work.loss)
            return up, rounds.moved(own, work.phi, message["late"]) if mine else own

        alone = Phase(local, max(local_steps, 1), batch_size=batch_size, turns=draws)
        before = replace(alone, count=local_steps if mine else 0)
        together = Phase(joint, global_steps, batch_size=batch_size, turns=draws)

        def new(message: Tree) -> FedSVIState:
            return _first_state(at_prior_middle(program, message["params"]), local_optimizer)

        return Client(
            own=_first_state(mine, local_optimizer) if mine else {},
            start=start,
            phases=(before, together),
            finish=finish,
            params=lambda message, own: {**message["params"], **(own.mean if mine else {})},
            adapt=(alone,) if mine else (),
            new=new if mine else None,
        )

    def server(program: Program) -> Server:
        shared, _ = program.start()
        merging = averaged_by(program, merge)

        def update(state: FedSVIState, means: dict[str, Tree], clock: Clock) -> FedSVIState:
            now = rounds.message(state.at.params, clock)
            if merging is None:
                at = step(optimizer, means["gradient"], state.at, now["rate"])
            else:
                at = state.at._replace(params=merging.merged(means["copy"]))
            return rounds.moved(state, at, now["late"])

        return Server(
            state=_first_state(shared, optimizer),
            update=update,
            down=lambda state, clock: rounds.message(state.at.params, clock),
            final=lambda state, clock: rounds.message(state.mean, clock),
        )

    if not steps_along:
        return Method("sfvi_avg", model, guide, client, server)
    return Method("fedsvi", model, guide, client, server, traits=frozenset({"gradients"}))


def _first_state(params: Params, optimizer: Optimizer) -> FedSVIState:
    return FedSVIState(Stepped(params, optimizer.init(params)), params, torch.zeros(()))
