"""A model of each client's own beside FedAvg's: Ditto, each client alone, and APFL.

Ditto: a personal model pulled toward FedAvg's; without the pull, each client alone.

    client:  v <- theta in its first round, later its last v;
             for every mini-batch:  v <- v - lr grad[ nll(v) + prox/2 |v - theta|^2 ]
             w <- theta;  for every mini-batch:  w <- w - lr grad nll(w)                  as in FedAvg
    server:  theta <- sum_k (n_k / n) w_k

Source: Li et al. 2021, arXiv:2012.04221, Algorithm 1. The paper does not say where v starts: here a
client that has been in no round, or joins later, is at theta. As a model: v_k ~ Normal(theta, 1 /
prox), with theta plugged in from FedAvg, not learned from the v_k.

APFL: a client's own model, mixed with the common one by a weight alpha that may be learned.

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
from hierfl.method import Client, Method, Phase, Server, Share, Up, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    DescentState,
    OwnParams,
    TwoLevels,
    averaging_server,
    common_params,
    personal_client,
    plain_average,
    proximal_loss,
)
from hierfl.optimizers import SGD, Optimizer, Stepped, plain_lr, step
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


class APFLClientState(NamedTuple):
    """A client's own model, and its weight in the mixture, (); `seen`, (), as in `OwnParams`."""

    v: Params
    alpha: Tensor
    seen: Tensor


class APFLShare(NamedTuple):
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
            mixing = APFLShare(own.alpha, torch.full((), float(adaptive)))
            return TwoLevels(w, v, torch.zeros(()), mixing)

        def personal(work: TwoLevels, batch: ClientBatch) -> TwoLevels:
            w, v, (weight, moves) = work.theta.params, work.phi, work.beside
            gradient, value = slope(
                lambda at: program.mean_loss(at, batch), _mixed(w, v.params, weight)
            )
            mine = step(optimizer, scaled(gradient, weight), v)
            along = sum(((v.params[n] - w[n]) * gradient[n]).sum() for n in gradient)
            moved = (weight - moves * alpha_lr * along).clamp(0.0, 1.0)
            return TwoLevels(work.theta, mine, value, APFLShare(moved, torch.zeros(())))

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
