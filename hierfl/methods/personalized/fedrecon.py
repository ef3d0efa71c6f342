"""FedRecon: partly local models; stateless clients reconstruct the local part from its start.

    client:  its rows are split into support and query;  h <- h_0, b <- theta
             for every mini-batch of the support:  h <- h - lr_h grad_h nll(b, h)     (b fixed)
             for every mini-batch of the query:    b <- b - lr_b grad_b nll(b, h)     (h fixed)
    server:  theta <- theta + optimizer(-sum_k (q_k / q) (b_k - theta)),  q_k query rows used
    served:  (theta, h reconstructed on the client's rows)

Source: Singhal et al. 2021, arXiv:2102.03448, Algorithm 1. Differences from the authors' code: rows
are split at random in each round (theirs alternates mini-batches), and passes are not cut off at 50
mini-batches. No round reads what an earlier one left at a client: h is kept for predictions alone.
The prior in it is implicit: h is a point under a flat prior, held near its fixed start by the few
steps; theta is a point that maximizes, to first order, the likelihood of the query after
reconstruction. Neither has a posterior; the guide is `delta`.
"""

from dataclasses import replace
from typing import Literal

import torch

from hierfl.core.arguments import NameRule
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Rows, Server
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, TwoLevels, personal_client
from hierfl.methods.personalized.fedrep import Optimizers, body_and_head, check_has_body, moving
from hierfl.methods.wrappers.averages import with_optimizer
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="a common body, and a head reconstructed from a fixed start on some of a client's rows; no state",
    source="Singhal et al. 2021, arXiv:2102.03448",
    common="a body",
    own="a head, reconstructed each time",
    kept="its last head, only for predictions",
    new="makes a head from its rows",
    down="the body",
    up="`theta`, `loss`, weighted by the number of rows that its steps on the body used",
)
def fedrecon(
    model: Model,
    *,
    head: NameRule | None = None,
    head_optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    body_optimizer: Optimizer = SGD(0.5),  # noqa: B008 (frozen)
    server_optimizer: Optimizer = SGD(1.0),  # noqa: B008 (frozen)
    head_steps: int = 5,
    body_steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 5,
    split: bool = True,
) -> Method:
    """Return FedRecon of a program without latent sites, such as `hierfl.models.network`.

    Clients of the fit predict with the head of their last round. `fit.personalize(rows, rounds=1)`
    reconstructs it on all rows given, at the last body, for these and for new clients.

    Args:
        model: its params are all global, or the local ones are the head; the loss is the mean
            negative log likelihood of a row.
        head: which global params are the local part, as in `fedrep`; "none" is FedAvg with a server
            optimizer. Its start is the program's.
        head_optimizer: of the reconstruction, restarted in each round. Defaults: the authors'
            for MovieLens.
        body_optimizer: of the body, likewise.
        server_optimizer: of the server; their StackOverflow runs take Yogi with step size 0.1.
        head_steps: passes over the support, or mini-batches of it (`unit`).
        body_steps: the same over the query.
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        split: False: support and query are both all rows.

    Raises:
        ValueError: (at fit) `head` matches no param.
        ProgramError: (at fit) `head` matches every param, is missing, or is given though the model
            has local params; or the model has latent sites.
    """

    def client(program: Program) -> Client:
        split_params = body_and_head(program, head, "fedrecon")
        check_has_body(split_params, "fedrecon")
        optimizers: Optimizers = {"phi": head_optimizer, "theta": body_optimizer}
        support: Rows = "support" if split else "all"
        query: Rows = "query" if split else "all"
        move = moving(program, {"theta": body_optimizer})

        def start(message: Params, own: OwnParams) -> TwoLevels:
            # beside the parts, the number of rows that the steps on the body go through
            none, first = torch.zeros(()), split_params.first_head(message)
            return split_params.work(message, first, optimizers, none)

        def counted(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            after: TwoLevels = move(work, message, batch)
            return after._replace(beside=work.beside + batch.mask().sum())

        on_head = Phase(
            moving(program, {"phi": head_optimizer}), head_steps, unit, batch_size, support
        )
        made = (on_head,) if split_params.head and head_steps else ()
        return personal_client(
            OwnParams(split_params.head, torch.zeros(())),
            lambda message, own: own._replace(params=split_params.first_head(message)),
            start=start,
            phases=(*made, Phase(counted, body_steps, unit, batch_size, query)),
            finish=lambda work, message, own, rows: split_params.finished(
                work, message, own, work.beside
            ),
            params=lambda message, own: {**message, **own.params},
            adapt=tuple(replace(phase, rows="all") for phase in made),
        )

    def server(program: Program) -> Server:
        return with_optimizer(body_and_head(program, head, "fedrecon").server(), server_optimizer)

    return Method("fedrecon", model, delta, client, server)
