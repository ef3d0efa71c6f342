"""Per-FedAvg: a common start from which one gradient step on its rows fits a client.

    minimize sum_k f_k(theta - a grad f_k(theta))

    client:  w <- theta;  for every three mini-batches D, D', D'':
             g <- grad f(w - a grad f(w; D); D')
             w <- w - b g                                                                first order
             w <- w - b (g - a [grad f(w + d g; D'') - grad f(w - d g; D'')] / (2 d))  Hessian-free
             w <- w - b (I - a Hess f(w; D'')) g                                         full
             serves theta - a grad f_k(theta), over all its rows
    server:  theta <- sum_k (n_k / n) w_k

Source: Fallah, Mokhtari and Ozdaglar 2020, arXiv:2002.07948, Algorithm 1 and Section 5.
Differences: means are weighted by rows, as in `fedavg`, and the step before a prediction takes all
training rows. No part is Bayesian: one step from theta is a MAP estimate that stops early, under a
Normal prior about theta only where the model is linear.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, scaled, sub, tree_leaves, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    DescentState,
    averaging_client,
    common_params,
    parts,
    plain_average,
)
from hierfl.methods.wrappers.fine_tuned import fine_tuned
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

Meta = Literal["first", "hessian-free", "full"]
BATCHES = {"first": 2, "hessian-free": 3, "full": 3}  # independent mini-batches of a step


@About(
    infers="a common start from which one gradient step fits a client",
    source="Fallah et al. 2020, arXiv:2002.07948",
    common="a start for one step",
    kept="its weights one step from those received",
    new="one step on its rows",
    up="`theta`*: its weights after training; `loss`*",
)
def per_fedavg(
    model: Model,
    *,
    inner_optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    optimizer: Optimizer = SGD(0.01),  # noqa: B008
    meta: Meta = "first",
    difference: float = 1e-3,
    steps: int = 20,
    batch_size: int | None = 20,
) -> Method:
    """Return Per-FedAvg of a program whose params are all global, such as `hierfl.models.network`.

    A client is served one step from the params that its last round began with.
    `fit.personalize(rows, rounds=1)` takes the step from the last ones, for these clients or new
    ones.

    Args:
        model: as in `fedavg`.
        inner_optimizer: of the step that fits a client, plain SGD with step size a; SGD(0.0):
            FedAvg. Defaults of both optimizers, meta, steps and batch_size: PRIOR's,
            arXiv:2310.09183, appendix C (FedABML takes 1e-4 and "hessian-free").
        optimizer: of w, b in the paper; restarted in each round.
        meta: "first", "hessian-free" or "full": how the derivative of the step is treated. "first"
            leaves it out, and finds another optimum than the other two.
        difference: d of "hessian-free", > 0. Default: hierfl's own choice; any d is exact for a
            quadratic loss.
        steps: meta-steps of a round.
        batch_size: rows of each of a step's independent mini-batches, two of "first" and three of
            the others. Where a client has too few, they share rows. None: all rows, in each.

    Raises:
        ValueError: `inner_optimizer` is not plain SGD, `difference` is not above 0, or `meta` is
            none of the three.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(meta=(meta, BATCHES), difference=(difference, "(0, inf)"))
    inner_lr = plain_lr(
        inner_optimizer, "inner_optimizer", "a client is fitted by one gradient step"
    )

    def client(program: Program) -> Client:
        common_params(program, "per_fedavg")

        def move(work: DescentState, message: Tree, batch: ClientBatch) -> DescentState:
            count = BATCHES[meta]
            batches = (batch,) * 3 if batch_size is None else parts(batch, batch_size, count)
            gradient, value = _meta_gradient(program, work.w, batches, inner_lr, meta, difference)
            return descent.stepped(work, gradient, value)

        together = None if batch_size is None else BATCHES[meta] * batch_size
        phase = Phase(move, steps, batch_size=together, nested=meta == "full", alone=batch_size)
        descent = Descent(optimizer, steps, "step", together)
        return averaging_client(descent, phase, adapt=())

    plain = Method("per_fedavg", model, delta, client, plain_average)
    served = fine_tuned(
        plain, steps=1, unit="step", batch_size=None, optimizer=inner_optimizer, when="every round"
    )
    return replace(served, name="per_fedavg")


def _meta_gradient(
    program: Program,
    w: Params,
    batches: tuple[ClientBatch, ...],
    inner_lr: float,
    meta: Meta,
    difference: float,
) -> tuple[Params, Tensor]:
    """Return the gradient in w of f(w - a grad f(w; D); D'), and f; `batches` are D, D', D''."""

    def gradient_at(at: Params, batch: ClientBatch) -> Params:
        return slope(lambda p: program.mean_loss(p, batch), at)[0]

    inner = tree_map(lambda p, g: p - inner_lr * g, w, gradient_at(w, batches[0]))
    g, value = slope(lambda p: program.mean_loss(p, batches[1]), inner)
    if meta == "first":
        return g, value
    if meta == "full":

        def along(at: Params) -> Tensor:
            products = tree_map(lambda a, b: (a * b).sum(), gradient_at(at, batches[2]), g)
            return sum(tree_leaves(products), torch.zeros(()))

        curved = grad(along)(w)
    else:
        either = [
            gradient_at(tree_map(lambda p, v, by=by: p + by * v, w, g), batches[2])
            for by in (difference, -difference)
        ]
        curved = scaled(sub(*either), 0.5 / difference)
    return tree_map(lambda a, b: a - inner_lr * b, g, curved), value
