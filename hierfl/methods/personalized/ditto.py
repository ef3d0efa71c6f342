"""Ditto: a personal model pulled toward FedAvg's; and, without the pull, each client alone.

    client:  v <- theta in its first round, later its last v;
             for every mini-batch:  v <- v - lr grad[ nll(v) + prox/2 |v - theta|^2 ]
             w <- theta;  for every mini-batch:  w <- w - lr grad nll(w)                  as in FedAvg
    server:  theta <- sum_k (n_k / n) w_k

Source: Li et al. 2021, arXiv:2012.04221, Algorithm 1. The paper does not say where v starts: here a
client that has been in no round, or joins later, is at theta. As a model: v_k ~ Normal(theta, 1 /
prox), with theta plugged in from FedAvg, not learned from the v_k.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    DescentState,
    OwnParams,
    averaging_server,
    common_params,
    personal_client,
    proximal_loss,
)
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="a personal model held near FedAvg's",
    source="Li et al. 2021, arXiv:2012.04221",
    common="weights",
    own="weights near them",
    kept="its personal weights",
    new="fits its weights",
    up="`theta`*: its copy of the common weights after training; `loss`*",
)
def ditto(
    model: Model,
    *,
    prox: float = 1.0,
    optimizer: Optimizer = SGD(0.05),  # noqa: B008 (frozen)
    steps: int = 2,
    personal_steps: int | None = None,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 16,
) -> Method:
    """Return Ditto of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites; the loss is the mean negative log
            likelihood of a row.
        prox: pull of the personal model to the common one, lambda in the paper; 0: each client
            alone. Defaults: the authors' for Fashion-MNIST (that of their code is 0).
        optimizer: of both models, restarted in each round.
        steps: mini-batches of a round for the common model, or passes over the rows (`unit`).
        personal_steps: the same for the personal model; None: `steps`.
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """
    personal_steps = steps if personal_steps is None else personal_steps
    return _alongside(
        "ditto", model, prox, Descent(optimizer, steps, unit, batch_size), personal_steps
    )


@About(
    infers="each client alone",
    common="none",
    own="weights",
    kept="its weights",
    new="fits its weights",
    down="the starting weights",
    up="`loss`*",
)
def local_only(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.05),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
) -> Method:
    """Return the baseline in which every client fits alone, from the module's weights.

    Args:
        model: as in `ditto`.
        optimizer: restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """
    return _alongside("local_only", model, 0.0, Descent(optimizer, 0, unit, batch_size), steps)


class DittoWork(NamedTuple):
    """The personal model, and the client's copy of the common one."""

    mine: DescentState
    ours: DescentState


def _alongside(
    name: str, model: Model, prox: float, descent: Descent, personal_steps: int
) -> Method:
    def client(program: Program) -> Client:
        def personal(work: DittoWork, message: Params, batch: ClientBatch) -> DittoWork:
            def loss(w: Params) -> Tensor:
                return proximal_loss(program, w, message, prox, batch)

            return DittoWork(descent.moved(work.mine, loss), work.ours)

        def common(work: DittoWork, message: Params, batch: ClientBatch) -> DittoWork:
            ours = descent.moved(work.ours, lambda w: program.mean_loss(w, batch))
            return DittoWork(work.mine, ours)

        def finish(
            work: DittoWork, message: Params, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            up = {"loss": Share(work.mine.loss, rows)}
            if descent.steps:
                up["theta"] = Share(work.ours.w, rows)
            return up, OwnParams(work.mine.w, torch.ones(()))

        tuning = descent.taking(personal, personal_steps)
        return personal_client(
            OwnParams(common_params(program, name), torch.zeros(())),
            lambda message, own: own._replace(params=message),
            start=lambda message, own: DittoWork(descent.begin(own.params), descent.begin(message)),
            # the common model comes first: in phase 0 its mini-batches are those of fedavg
            phases=(descent.taking(common), tuning),
            finish=finish,
            params=lambda message, own: own.params,
            adapt=(tuning,),
        )

    def server(program: Program) -> Server:
        return averaging_server(program.start()[0], lambda theta, means: means.get("theta", theta))

    return Method(name, model, delta, client, server)
