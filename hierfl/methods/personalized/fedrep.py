"""FedRep: a common body, and a head of each client's own; and FedPer, which moves both at once.

    client:  b <- theta, h <- its own last head, first the common start;
             for every mini-batch:  h <- h - lr grad_h nll(b, h)           with b fixed
             for every mini-batch:  b <- b - lr grad_b nll(b, h)           with h fixed
    server:  theta <- sum_k (n_k / n) b_k

Sources: Collins et al. 2021, arXiv:2102.07078, Algorithm 1; FedPer: Arivazhagan et al. 2019,
arXiv:1912.00818, Algorithms 1 and 2. Differences from the authors' code: each part has an optimizer
of its own (theirs keeps one with momentum, under which the frozen part moves on); there is no
weight decay (theirs is 1e-4); and no last round in which all clients refit their heads
(`fit.personalize` does so, from the common start). Nothing in it is Bayesian: the body is one point
for all clients and each head a point under a flat prior, so that heads do not borrow strength; the
guide is `delta`.
"""

from __future__ import annotations

from typing import Literal

from hierfl.core.arguments import NameRule
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server
from hierfl.methods.about import About
from hierfl.methods.parts.personal import personal_client
from hierfl.methods.personalized.body_and_head import Optimizers, body_and_head, moving
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Model


@About(
    infers="a common body, and a head of each client's own; FedPer with `joint=True`",
    source="Collins et al. 2021, arXiv:2102.07078; FedPer: Arivazhagan et al. 2019",
    common="a body",
    own="a head",
    kept="its head",
    new="fits a head",
    down="the body",
    up="`theta`*: its copy of it after training; `loss`*",
)
def fedrep(
    model: Model,
    *,
    head: NameRule | None = None,
    optimizer: Optimizer = SGD(0.01, 0.5),  # noqa: B008 (frozen)
    head_steps: int = 10,
    body_steps: int = 1,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 10,
    joint: bool = False,
) -> Method:
    r"""Return FedRep of a program without latent sites, such as `hierfl.models.network`.

    Args:
        model: its params are all global, or the local ones are the head; the loss is the mean
            negative log likelihood of a row.
        head: which global params are the head, by the names in the program: a regular expression
            such as r"^theta\.4\.", a sequence of prefixes or a predicate; "none" is FedAvg, "all"
            each client alone. None where the model declares params inside `batch.clients()`: they
            are the head.
        optimizer: of either part, restarted in each round. Defaults: the authors' for CIFAR-10.
        head_steps: passes over the rows on the head, or mini-batches (`unit`); a new client takes
            these alone.
        body_steps: the same on the body.
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        joint: body and head move at once, `body_steps` times: FedPer.

    Raises:
        ValueError: (at fit) `head` matches no param.
        ProgramError: (at fit) `head` matches every param, is missing, or is given though the model
            has local params; or the model has latent sites.
    """
    name = "fedper" if joint else "fedrep"

    def client(program: Program) -> Client:
        split = body_and_head(program, head, name)
        optimizers: Optimizers = {"body": optimizer, "head": optimizer}

        on_head = Phase(moving(program, {"head": optimizer}), head_steps, unit, batch_size)
        on_body = Phase(moving(program, {"body": optimizer}), body_steps, unit, batch_size)
        on_all = Phase(moving(program, optimizers), body_steps, unit, batch_size)
        tuned = (on_head,) if split.head and head_steps else ()
        trained = (on_body,) if split.body and body_steps else ()
        return personal_client(
            {"head": split.head},
            lambda message, own: {"head": split.first_head(message)},
            start=lambda message, own: split.work(message, own["head"], optimizers),
            # a phase without steps is left out: mini-batches stay those of methods without it
            phases=(on_all,) if joint else (*tuned, *trained),
            finish=split.finished,
            params=lambda message, own: {**message, **own["head"]},
            adapt=tuned,
        )

    def server(program: Program) -> Server:
        return body_and_head(program, head, name).server()

    return Method(name, model, delta, client, server)
