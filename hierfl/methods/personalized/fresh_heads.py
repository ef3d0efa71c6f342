"""Heads that a client trains from a common start: FedBABU, and FedRecon.

FedBABU: only the body is trained; the random head is tuned with it at the end.

    client:  b <- theta;  for every mini-batch:  b <- b - lr grad_b nll(b, h_0)     h_0 one start for all
    server:  theta <- mean_k b_k
    served:  (theta, h_0), after personalize: tuned on the client's rows, both parts or the head alone

Source: Oh et al. 2022, arXiv:2106.06042, Algorithm 1. As in the authors' code the mean over clients
is uniform (`by_rows` weights it by rows). Theirs multiplies the step size by 0.1 at half and at
three quarters of the rounds; here it is constant. Nothing in it is Bayesian: the body is one point
given a fixed head, and what is tuned a point under a flat prior, held near its start by the few
steps alone; the guide is `delta`.

FedRecon: partly local models; stateless clients reconstruct the local part from its start.

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
from torch import Tensor

from hierfl.core.arguments import NameRule, expect
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Rows, Server, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, TwoLevels
from hierfl.methods.personalized.fedrep import Optimizers, body_and_head, body_below, moving
from hierfl.methods.wrappers.averages import with_optimizer
from hierfl.methods.wrappers.fine_tuned import tuned, tuning
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.sites import Model


@About(
    infers="a common body under a head that stays at its random start until a client tunes both",
    source="Oh et al. 2022, arXiv:2106.06042",
    common="a body",
    own="all, at the end",
    kept="what it has tuned: all of its weights, or the head",
    new="tunes the whole, or its head",
    down="the body",
    up="`theta`: its copy of it after training; `loss`",
)
def fedbabu(
    model: Model,
    *,
    head: NameRule | None = None,
    optimizer: Optimizer = SGD(0.1, 0.9),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
    tune: Literal["all", "head"] = "all",
    tune_steps: int = 5,
    tune_optimizer: Optimizer | None = None,
) -> Method:
    """Return FedBABU of a program without latent sites, such as `hierfl.models.network`.

    `fit.personalize(rows, rounds=1)` tunes, for clients of the fit and new ones. Before it,
    predictions come from the random head.

    Args:
        model: its params are all global, or the local ones are the head; the loss is the mean
            negative log likelihood of a row.
        head: which global params are the head, as in `fedrep`; "none" is FedAvg with a uniform
            mean.
        optimizer: of the body, restarted in each round. Defaults: the authors'.
        steps: passes over the rows in a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        tune: what a client tunes: "all" of the params, or the "head".
        tune_steps: passes over its rows, or mini-batches (`unit`), in each round of `personalize`,
            each continuing from the last one; 1 or more.
        tune_optimizer: of the tuning; None: `optimizer`, as the authors'. Under a small frozen head
            the features of the body can grow large, and tuning then needs smaller steps: on
            scikit-learn's digits with a convolutional network SGD(0.001) raised the accuracy where
            SGD(0.1) lowered it.

    Raises:
        ValueError: `tune` is neither "all" nor "head", or `tune_steps` is below 1; (at fit) `head`
            matches no param.
        ProgramError: (at fit) `head` matches every param, is missing, or is given though the model
            has local params; there is none to tune; or the model has latent sites.
    """
    expect(tune=(tune, ("all", "head")), tune_steps=(tune_steps, "[1, inf)"))

    def client(program: Program) -> Client:
        split = body_below(program, head, "fedbabu")

        def start(message: Params, own: Tree) -> TwoLevels:
            return split.work(message, split.first_head(message), {"theta": optimizer})

        def finish(work: TwoLevels, message: Params, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            return split.sent(work, 1.0), own

        plain = Client(
            own={},
            start=start,
            phases=(Phase(moving(program, {"theta": optimizer}), steps, unit, batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **split.first_head(message)},
        )
        first = {**split.body, **split.head} if tune == "all" else split.head
        if not first:
            raise ProgramError("tune is 'head', and the head is empty: use tune='all'")
        how = tune_optimizer or optimizer
        taken = Phase(tuning(program, plain, how), tune_steps, unit, batch_size)
        return tuned(plain, first, how, taken)

    def server(program: Program) -> Server:
        return body_and_head(program, head, "fedbabu").server()

    return Method("fedbabu", model, delta, client, server)


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
        parts = body_below(program, head, "fedrecon")
        optimizers: Optimizers = {"phi": head_optimizer, "theta": body_optimizer}
        support: Rows = "support" if split else "all"
        query: Rows = "query" if split else "all"
        move = moving(program, {"theta": body_optimizer})

        def start(message: Params, own: OwnParams) -> TwoLevels:
            # beside the parts, the number of rows that the steps on the body go through
            none, first = torch.zeros(()), parts.first_head(message)
            return parts.work(message, first, optimizers, none)

        def counted(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            after: TwoLevels = move(work, message, batch)
            return after._replace(beside=work.beside + batch.mask().sum())

        tune = moving(program, {"phi": head_optimizer})
        on_head = Phase(tune, head_steps, unit, batch_size, support)
        made = (on_head,) if parts.head and head_steps else ()
        phases = (*made, Phase(counted, body_steps, unit, batch_size, query))
        kept = parts.client(start, phases, tuple(replace(phase, rows="all") for phase in made))
        return replace(
            kept,
            finish=lambda work, message, own, _: parts.finished(work, message, own, work.beside),
        )

    def server(program: Program) -> Server:
        return with_optimizer(body_and_head(program, head, "fedrecon").server(), server_optimizer)

    return Method("fedrecon", model, delta, client, server)
