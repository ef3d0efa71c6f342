"""APFL: each client's own model, mixed with the common one by a weight alpha that may be learned.

    client:  w <- theta; v and alpha: its own last ones, first theta and the given alpha
             for every mini-batch:  g = grad nll(alpha v + (1 - alpha) w)
                 w <- w - lr grad nll(w),   v <- v - lr alpha g
                 at the first, if adaptive:  alpha <- alpha - lr_alpha <v - w, g>, clipped to [0, 1]
    server:  theta <- mean_k w_k
    served:  alpha v + (1 - alpha) theta

Source: Deng et al. 2020, arXiv:2003.13461, Algorithm 1; all of a step is at the old values. It
mixes params, as in the paper; the authors' code mixes outputs, and steps alpha with a decay.
Nothing in it is Bayesian: w and v are points under flat priors. With alpha above 0 the mixture can
be any point, so that nothing shrinks v at convergence; only few steps keep it near theta. At alpha
0 the step of v is 0, so that v stays as it is. The guide is `delta`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.trees import scaled, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    TwoLevels,
    common_params,
    personal_client,
    plain_average,
)
from hierfl.optimizers import SGD, Optimizer, Stepped, plain_lr, step
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


class APFLClientState(NamedTuple):
    """A client's own model, and its weight in the mixture, (); `seen`, (), as in `OwnParams`."""

    v: Params
    alpha: Tensor
    seen: Tensor


class Mixing(NamedTuple):
    """The weight of a client's own model in the mixture, (), and whether it moves in the next step, ()."""

    alpha: Tensor
    moves: Tensor


@About(
    infers="a mixture of each client's own model and the common one, with a weight that may be learned",
    source="Deng et al. 2020, arXiv:2003.13461",
    common="weights",
    own="weights, and a share of them",
    kept="its own weights, and the weight of its own model",
    new="the common model, then as the others",
    up="`theta`: its copy of them after training; `loss`",
)
def apfl(
    model: Model,
    *,
    alpha: float = 0.5,
    adaptive: bool = False,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    alpha_optimizer: Optimizer = SGD(0.1),  # noqa: B008
    steps: int = 10,
    unit: Literal["step", "epoch"] = "step",
    batch_size: int | None = 50,
) -> Method:
    """Return APFL of a program whose params are all global, such as `hierfl.models.network`.

    Args:
        model: a program with global params and no latent sites; the loss is the mean negative log
            likelihood of a row.
        alpha: weight of a client's own model, in [0, 1]: 0 is the common model, 1 each client
            alone; where `adaptive`, its start. Defaults: those of the authors' code.
        adaptive: learn alpha, one step a round.
        optimizer: of both models, restarted in each round.
        alpha_optimizer: of alpha, plain SGD; in the paper with the step size of the models.
        steps: mini-batches of a round, or passes over the rows (`unit`).
        unit: "step" or "epoch".
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ValueError: `alpha` is outside [0, 1], or `alpha_optimizer` is not plain SGD.
        ProgramError: (at fit) the model has latent sites or local params.
    """
    expect(alpha=(alpha, "[0, 1]"))
    alpha_lr = plain_lr(alpha_optimizer, "alpha_optimizer", "alpha takes one clipped step a round")

    def client(program: Program) -> Client:
        above = common_params(program, "apfl")

        def start(message: Params, own: APFLClientState) -> TwoLevels:
            w, v = (Stepped(at, optimizer.init(at)) for at in (message, own.v))
            mixing = Mixing(own.alpha, torch.full((), float(adaptive)))
            return TwoLevels(w, v, torch.zeros(()), mixing)

        def personal(work: TwoLevels, batch: ClientBatch) -> TwoLevels:
            w, v, (weight, moves) = work.theta.params, work.phi, work.beside
            gradient, value = slope(
                lambda at: program.mean_loss(at, batch), _mixed(w, v.params, weight)
            )
            mine = step(optimizer, scaled(gradient, weight), v)
            along = sum(((v.params[n] - w[n]) * gradient[n]).sum() for n in gradient)
            moved = (weight - moves * alpha_lr * along).clamp(0.0, 1.0)
            return TwoLevels(work.theta, mine, value, Mixing(moved, torch.zeros(())))

        def move(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            gradient, _ = slope(lambda at: program.mean_loss(at, batch), work.theta.params)
            return personal(work, batch)._replace(theta=step(optimizer, gradient, work.theta))

        def tune(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            return personal(work, batch)

        def finish(
            work: TwoLevels, message: Params, own: APFLClientState, rows: Tensor
        ) -> tuple[Up, APFLClientState]:
            up: Up = {"theta": Share(work.theta.params), "loss": Share(work.loss)}
            return up, APFLClientState(work.phi.params, work.beside.alpha, torch.ones(()))

        return personal_client(
            APFLClientState(above, torch.tensor(alpha), torch.zeros(())),
            lambda message, own: own._replace(v=message),
            start=start,
            phases=(Phase(move, steps, unit, batch_size),),
            finish=finish,
            params=lambda message, own: _mixed(message, own.v, own.alpha),
            adapt=(Phase(tune, steps, unit, batch_size),),
        )

    return Method("apfl", model, delta, client, plain_average)


def _mixed(w: Params, v: Params, alpha: Tensor) -> Params:
    """Return alpha v + (1 - alpha) w, which is exactly v at 1 and w at 0."""
    return tree_map(lambda a, b: alpha * b + (1.0 - alpha) * a, w, v)
