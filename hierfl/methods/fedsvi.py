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

from typing import Literal

from hierfl.guides.structured import structured
from hierfl.method import Client, Method, Server
from hierfl.methods.about import About
from hierfl.methods.fedsvi_client import Setting, svi_client
from hierfl.methods.fedsvi_server import svi_server
from hierfl.optimizers import SGD, Adam, Optimizer, plain_lr
from hierfl.program.program import Program
from hierfl.program.sites import Family, Guide, Model


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
    how = Setting(
        optimizer=optimizer,
        local_optimizer=local_optimizer,
        local_steps=local_steps,
        global_steps=global_steps,
        global_lr=plain_lr(
            global_optimizer,
            "global_optimizer",
            "the server steps along the mean gradient of the path",
        ),
        batch_size=batch_size,
        draws=draws,
        schedule=schedule,
        average=average,
    )

    def client(program: Program) -> Client:
        return svi_client(program, how)

    def server(program: Program) -> Server:
        return svi_server(program, how)

    return Method("fedsvi", model, guide, client, server, traits=frozenset({"gradients"}))
