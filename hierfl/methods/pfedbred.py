"""pFedBreD: personalized models under a Bregman prior whose mean each client moves toward itself.

    client:  w <- theta;  for every mini-batch:
                 mu <- as the strategy says
                 K times  v <- v - lr grad_v [ nll(v) + prox D(v, mu) ]
                 w <- w - eta prox (mu - v)                      ~ grad_w prox D(v, mu(w))
    server:  theta <- mean_k w_k

How the strategies choose mu:

    none    mu = w                                             (pFedMe)
    lg      mu = w - a grad nll(w)
    meg     mu = w - m (last - v)              last: the client's own w at the end of its last round
    mh      mu = w - a grad nll(w) - m (last - v)
    mh24    mu = w - a grad nll(w - a grad nll(w)) - m (last - v)
    mh-code mh24 with a mini-batch for each gradient, and w itself takes the first of its two steps

Source: Shi et al. 2023, arXiv:2310.09183, Algorithm 1, Eq. (14), and Eq. (24) for mh24; mh-code is
what the authors' code does under the name mh. All of it moves in natural
parameters, by gradients in the means (mirror steps), so that values stay where they are defined;
for a Gaussian of unit precision the two are one. There d D(v, mu(s)) / ds = mu - v exactly, and the
approximation left is d mu / d w = 1.

The paper's "+FT" and "+AM" are `fine_tuned(..., when="every round", mirror=True)` and
`over_relaxed`. In its Algorithm 1, as in the authors' code, all clients train and S of N are
averaged: `averaging_some(..., share=S / N)`. Their code weights clients by rows, `by_rows`; the
paper's mean is uniform.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, sub
from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import averaging_server, parts, personal_client
from hierfl.methods.parts.mirror import (
    Loss,
    domains_of_params,
    domains_of_sites,
    kept_inside,
    mirror_gradient,
    moved_inside,
)
from hierfl.methods.parts.prior_params import mean_params
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


class PFedBreDClientState(NamedTuple):
    """The local params v, the copy of the means after the last round as local params, if needed, and `seen`."""

    v: Params
    last: Params
    seen: Tensor


class PFedBreDWork(NamedTuple):
    """The client's copy w of the global params, v and `last` of its state, and the last loss, ()."""

    w: Params
    v: Params
    last: Params
    loss: Tensor


class Strategy(NamedTuple):
    """How mu is chosen, and whether w takes the gradient step as well."""

    gradients: int  # 0 to 2, of which the first of two is one step ahead
    remembers: bool
    moves_w: bool = False


STRATEGIES = {
    "none": Strategy(0, remembers=False),
    "lg": Strategy(1, remembers=False),
    "meg": Strategy(0, remembers=True),
    "mh": Strategy(1, remembers=True),
    "mh24": Strategy(2, remembers=True),
    "mh-code": Strategy(2, remembers=True, moves_w=True),
}


@About(
    infers="each client's point estimate near a prior mean that it moves toward itself, for any Bregman divergence",
    source="Shi et al. 2023, arXiv:2310.09183",
    common="a prior mean that moves to the client",
    own="weights",
    kept="its weights, and its last copy of the means",
    down="the prior's means",
    up="`theta`: its copy of them after training; `loss`",
)
def pfedbred(
    model: Model,
    strategy: Literal["none", "lg", "meg", "mh", "mh24", "mh-code"] = "mh",
    *,
    prox: float = 15.0,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    global_optimizer: Optimizer = SGD(0.01),  # noqa: B008
    gradient_step_size: float = 0.01,
    memory_step_size: float = 0.05,
    inner_steps: int = 5,
    steps: int = 20,
    batch_size: int | None = 20,
    inner_start: Literal["own", "global", "moved"] = "own",
) -> Method:
    """Return pFedBreD of a hierarchical program, by point estimates.

    Args:
        model: local sites whose prior's mean is a global param each:
            `hierfl.models.bayesian_network(module, prior_scale=1.0)`, the Gaussian of the paper's
            experiments, or `hierfl.models.bregman_network(module, prior)`.
        strategy: how mu is chosen: "none", "lg", "meg", "mh", "mh24" or "mh-code".
        prox: weight of the divergence, beside the mean negative log likelihood of a row; lambda in
            the paper, 15 to 60.
        optimizer: of the personalized model v, plain SGD; alpha in the paper. Defaults of the step
            sizes, inner_steps, steps and batch_size: the paper's.
        global_optimizer: of the client's copy w of the global model, plain SGD; alpha_m in the
            paper.
        gradient_step_size: a, eta_alpha in the paper. Keep it below 1 / the curvature of a client's
            loss, which grows in training: above it the step leads uphill, and the global params may
            collapse late in a run.
        memory_step_size: m, eta in the paper.
        inner_steps: K, steps of v on each mini-batch.
        steps: R, mini-batches of a round.
        batch_size: rows of a mini-batch; None: all. "mh-code" takes two mini-batches at a step.
        inner_start: where the K steps start. "own": at v where the last mini-batch left it, also
            from round to round (Algorithm 1). "global": the same, except at theta in the first step
            of a round (pFedMe's code). "moved": at w after its gradient step, for every mini-batch
            (the authors' code).

    Raises:
        ProgramError: (at fit) the model has no local site, or one whose prior's mean is no global
            param.
        ValueError: an unknown strategy, no inner step, or an optimizer other than plain SGD.
    """
    expect(strategy=(strategy, STRATEGIES), inner_steps=(inner_steps, "[1, inf)"))
    how, mirror = STRATEGIES[strategy], "its equations are of mirror descent"
    lr = plain_lr(optimizer, "optimizer", mirror)
    global_lr = plain_lr(global_optimizer, "global_optimizer", mirror)
    two = how.moves_w and batch_size is not None  # mini-batches of a step

    def client(program: Program) -> Client:
        mine = program.start()[1]
        # each local param, and the global one that is its prior's mean
        twins = {f"{site}.at": param for site, param in mean_params(program).items()}
        inside = partial(moved_inside, domains_of_params(program))
        moved = partial(moved_inside, domains_of_sites(program))

        def local(w: Params) -> Params:
            """Return global params as local ones: w in the place of v."""
            return {name: w[twin].view(mine[name].shape) for name, twin in twins.items()}

        def shared(v: Params, w: Params) -> Params:
            """Return global params w with local ones v in their place."""
            return {**w, **{twin: v[name].view(w[twin].shape) for name, twin in twins.items()}}

        def nll_at(v: Params, w: Params, batch: ClientBatch) -> Tensor:
            return program.mean_loss({**w, **v}, batch)

        def descended(loss: Loss, v: Params, rate: float, at: Params) -> Params:
            """Return v after a mirror step on a loss whose gradient is taken at `at`."""
            return moved(v, mirror_gradient(program, loss, at), rate)

        def put(work: PFedBreDWork, batches: tuple[ClientBatch, ...]) -> tuple[Params, Params]:
            """Return mu, and w as far as its gradient step alone has moved it, both as local params."""
            w, near = work.w, (middle := local(work.w))
            for batch in batches[2 - how.gradients :]:
                nll = partial(nll_at, w=w, batch=batch)
                near = descended(nll, middle, gradient_step_size, near)
            if not how.remembers:
                return near, near
            return moved(near, sub(work.last, work.v), memory_step_size), near

        def move(work: PFedBreDWork, message: Tree, batch: ClientBatch) -> PFedBreDWork:
            batches = parts(batch, batch_size or 0) if two else (batch, batch)
            w, last = work.w, batches[1]
            mu, near = put(work, batches)
            at_mu, v = shared(mu, w), near if inner_start == "moved" else work.v

            def objective(v: Params, mu: Params) -> Tensor:
                return program.mean_loss({**mu, **v}, last, weight=prox)

            for _ in range(inner_steps):
                v = descended(partial(objective, mu=at_mu), v, lr, v)
            slope_of_mu = grad(partial(objective, v))(at_mu)
            w = shared(near, w) if how.moves_w else w
            loss = nll_at(v, at_mu, last)
            return PFedBreDWork(inside(w, slope_of_mu, global_lr), v, work.last, loss)

        def start(message: Params, own: PFedBreDClientState) -> PFedBreDWork:
            v = local(message) if inner_start == "global" else own.v
            return PFedBreDWork(message, v, own.last, torch.zeros(()))

        def state(v: Params, w: Params, seen: Tensor) -> PFedBreDClientState:
            return PFedBreDClientState(v, w if how.remembers else {}, seen)

        def finish(
            work: PFedBreDWork, message: Tree, own: PFedBreDClientState, rows: Tensor
        ) -> tuple[Up, PFedBreDClientState]:
            up = {"theta": Share(work.w), "loss": Share(work.loss)}
            return up, state(work.v, local(work.w), torch.ones(()))

        rows = 2 * batch_size if two and batch_size else batch_size
        return personal_client(
            state(mine, mine, torch.zeros(())),
            lambda message, own: state(local(message), local(message), own.seen),
            start=start,
            phases=(Phase(move, steps, batch_size=rows, turns=inner_steps, alone=batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **own.v},
        )

    def server(program: Program) -> Server:
        inside = partial(kept_inside, domains_of_params(program))
        return averaging_server(program.start()[0], inside=inside)

    return Method("pfedbred", model, delta, client, server)
