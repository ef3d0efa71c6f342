"""FedAvg, and FedProx, which adds a pull toward the global model.

    client:  w <- theta;  for every mini-batch:  w <- w - lr grad[ nll(w) + prox/2 |w - theta|^2 ]
    server:  theta <- sum_k (n_k / n) w_k

Sources: McMahan et al. 2017, arXiv:1602.05629; FedProx: Li et al. 2020, arXiv:1812.06127, Eq. (2).
"""

from typing import Literal

from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    averaging_client,
    common_params,
    plain_average,
    proximal_loss,
)
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="one global model; FedProx with `prox=`",
    source="McMahan et al. 2017, arXiv:1602.05629; FedProx: Li et al. 2020, arXiv:1812.06127",
    common="weights",
    new="the global model",
    up="`theta`*: its weights after training; `loss`*",
)
def fedavg(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 20,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 20,
    prox: float = 0.0,
) -> Method:
    """Return FedAvg of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites; the loss is the mean negative log
            likelihood of a row.
        optimizer: of the client, restarted in each round.
        steps: mini-batches of a round, or passes over the rows (`unit`). 20 mini-batches of 20 rows
            with step size 0.01: PRIOR's setting.
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.
        prox: mu of FedProx; 0: FedAvg.

    Raises:
        ValueError: `prox` is negative.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(prox=(prox, "[0, inf)"))
    descent = Descent(optimizer, steps, unit, batch_size)

    def client(program: Program) -> Client:
        common_params(program, "fedavg")

        def loss(w: Params, work: Tree, message: Tree, batch: ClientBatch) -> Tensor:
            return proximal_loss(program, w, message, prox, batch)

        return averaging_client(descent, descent.phase(loss))

    return Method("fedprox" if prox else "fedavg", model, delta, client, plain_average)
