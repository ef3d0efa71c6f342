"""FedBN: FedAvg, with batch normalization local to each client.

    client:  w <- (theta, its own b_k);  for every mini-batch:  w <- w - lr grad nll(w), normalized by the mini-batch
    server:  theta <- sum_k (n_k / n) theta_k
    predict: by theta, b_k and statistics of all the client's rows at these

It is FedPer whose heads are the layers of batch norm, inside `batch_normed`.

Source: Li et al. 2021, arXiv:2102.07623, Algorithm 1. Differences: means are weighted by rows
(uniform in its code), and statistics are exact, at the weights that the client is served, instead
of a running mean over its steps. Layers are found by their type, not by "bn" in their name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hierfl.method import Client, Method, Server
from hierfl.methods.about import About
from hierfl.methods.personalized.fedrep import fedrep
from hierfl.methods.wrappers.batch_normed import batch_normed, params_of_norms
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Model


@About(
    infers="FedAvg with each client's own batch normalization",
    source="Li et al. 2021, arXiv:2102.07623",
    common="weights except batch norm",
    own="batch norm",
    kept="its batch normalization: weights and statistics",
    new="statistics of its rows",
    down="the weights, batch normalization apart",
    up="`theta`*: the same weights after training; `loss`*",
)
def fedbn(
    model: Model,
    *,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 32,
) -> Method:
    """Return FedBN of a network with batch normalization, such as `hierfl.models.network(module)`.

    Without batch norm this is FedAvg; no warning is given. A client that was in no round predicts
    by the statistics of its rows at the common weights, with the scale and shift that the module
    has. `fine_tuned` cannot be around it, as around no method inside `batch_normed`.

    Args:
        model: a program with global params and no latent sites.
        optimizer: of the client, restarted in each round. Defaults: the authors' for digits.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has latent sites or local params.
    """

    def with_heads(program: Program) -> Method:
        plain = fedrep(
            model,
            head=params_of_norms(program) or "none",
            optimizer=optimizer,
            head_steps=0,
            body_steps=steps,
            unit=unit,
            batch_size=batch_size,
            joint=True,
        )
        return batch_normed(plain)

    def client(program: Program) -> Client:
        return with_heads(program).client(program)

    def server(program: Program) -> Server:
        return with_heads(program).server(program)

    normed = batch_normed(fedrep(model))
    return replace(normed, name="fedbn", client=client, server=server)
