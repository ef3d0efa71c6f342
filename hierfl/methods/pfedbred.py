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
approximation left is d mu / d w = 1: `jacobian="exact"` does without it.

The paper's "+FT" and "+AM" are `fine_tuned(..., when="every round", mirror=True)` and
`over_relaxed`. In its Algorithm 1, as in the authors' code, all clients train and S of N are
averaged: `averaging_some(..., share=S / N)`. Their code weights clients by rows, `by_rows`; the
paper's mean is uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.arguments import expect
from hierfl.core.trees import Tree, sub
from hierfl.data.batch import ClientBatch, parts
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import averaging_server
from hierfl.methods.parts.mirror import (
    Loss,
    domains_of_params,
    domains_of_sites,
    kept_inside,
    mirror_gradient,
    moved_inside,
)
from hierfl.methods.parts.personal import personal_client
from hierfl.methods.parts.prior_params import mean_params
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model

Word = Literal["none", "lg", "meg", "mh", "mh24", "mh-code"]


@About(
    infers=(
        "each client's point estimate near a prior mean that it moves toward itself, for "
        "any Bregman divergence"
    ),
    source="Shi et al. 2023, arXiv:2310.09183",
    common="a prior mean that moves to the client",
    own="weights",
    kept="its weights, and its last copy of the means",
    crosses="its copy of the mean",
    down="the prior's means",
    up="`theta`: its copy of them after training; `loss`",
)
def pfedbred(
    model: Model,
    strategy: Word | Strategy = "mh",
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
    jacobian: Literal["identity", "exact"] = "identity",
) -> Method:
    """Return pFedBreD of a hierarchical program, by point estimates.

    Args:
        model: local sites whose prior's mean is a global param each:
            `hierfl.models.bayesian_network(module, prior_scale=1.0)`, the Gaussian of the paper's
            experiments, or `hierfl.models.bregman_network(module, prior)`.
        strategy: how mu is chosen: "none", "lg", "meg", "mh", "mh24" or "mh-code", or a `Strategy`
            of your own.
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
        jacobian: of mu(w): "identity" takes it for 1; "exact" differentiates through the strategy's
            gradient.

    Raises:
        ProgramError: (at fit) the model has no local site, or one whose prior's mean is no global
            param.
        ValueError: an unknown strategy; an optimizer other than plain SGD; or an exact Jacobian of
            "mh-code", whose mu is no function of w.
    """
    chosen = strategy_of(strategy)
    if chosen.moves_w and jacobian == "exact":
        raise ValueError("mh-code moves w itself, and has no Jacobian: take mh24 for an exact one")
    mirror = "its equations are of mirror descent"
    how = PFedBreDSetting(
        strategy=chosen,
        prox=prox,
        lr=plain_lr(optimizer, "optimizer", mirror),
        global_lr=plain_lr(global_optimizer, "global_optimizer", mirror),
        gradient_step_size=gradient_step_size,
        memory_step_size=memory_step_size,
        inner_steps=inner_steps,
        steps=steps,
        batch_size=batch_size,
        inner_start=inner_start,
        exact=jacobian == "exact",
    )

    def server(program: Program) -> Server:
        inside = partial(kept_inside, domains_of_params(program))
        return averaging_server(program.start()[0], inside=inside)

    return Method("pfedbred", model, delta, partial(_client, how), server)


@dataclass(frozen=True)
class PFedBreDSetting:
    """The arguments of `pfedbred`; `lr` and `global_lr` are the step sizes of its optimizers."""

    strategy: Strategy
    prox: float
    lr: float
    global_lr: float
    gradient_step_size: float
    memory_step_size: float
    inner_steps: int
    steps: int
    batch_size: int | None
    inner_start: Literal["own", "global", "moved"]
    exact: bool


@dataclass(frozen=True, eq=False)
class Twins:
    """Every local param and the global one that is its prior's mean."""

    program: Program
    of: Mapping[str, str]  # local param -> global param
    mine: Params  # local params as they start

    def local(self, w: Params) -> Params:
        """Return global params as local ones: w in the place of v."""
        return {name: w[twin].view(self.mine[name].shape) for name, twin in self.of.items()}

    def shared(self, v: Params, w: Params) -> Params:
        """Return global params w with local ones v in their place."""
        return {**w, **{twin: v[name].view(w[twin].shape) for name, twin in self.of.items()}}

    def nll(self, v: Params, w: Params, batch: ClientBatch) -> Tensor:
        """Return the mean negative log likelihood of a row, ()."""
        return self.program.mean_loss({**w, **v}, batch)

    def descended(self, loss: Loss, v: Params, rate: float, at: Params) -> Params:
        """Return v after a mirror step on a loss whose gradient is taken at `at`."""
        return self.moved(v, mirror_gradient(self.program, loss, at), rate)

    def moved(self, v: Params, by: Params, rate: float) -> Params:
        """Return v - rate * by, inside the domain of every site."""
        return moved_inside(domains_of_sites(self.program), v, by, rate)


def _client(how: PFedBreDSetting, program: Program) -> Client:
    of = {f"{site}.at": param for site, param in mean_params(program).items()}
    twins = Twins(program, of, program.start()[1])
    two = how.strategy.moves_w and how.batch_size is not None
    inside = partial(moved_inside, domains_of_params(program))

    def objective(v: Params, mu: Params, batch: ClientBatch) -> Tensor:
        return program.mean_loss({**mu, **v}, batch, weight=how.prox)

    def put(w: Params, work: Tree, first: ClientBatch, second: ClientBatch) -> Put:
        middle = twins.local(w)

        def descended(batch: ClientBatch, at: Params) -> Params:
            nll = partial(twins.nll, w=w, batch=batch)
            return twins.descended(nll, middle, how.gradient_step_size, at)

        def remembered(at: Params) -> Params:
            return twins.moved(at, sub(work["last"], work["v"]), how.memory_step_size)

        place = MetaPoint(middle, partial(descended, first), partial(descended, second), remembered)
        return how.strategy.put(place)

    def move(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        first, second = parts(batch, how.batch_size or 0) if two else (batch, batch)
        w = work["w"]
        mu, near = put(w, work, first, second)
        at_mu, v = twins.shared(mu, w), near if how.inner_start == "moved" else work["v"]
        for _ in range(how.inner_steps):
            v = twins.descended(partial(objective, mu=at_mu, batch=second), v, how.lr, v)
        slope_of_mu = grad(lambda mu: objective(v, mu, second))(at_mu)
        if how.exact:
            through = vjp(lambda w: twins.shared(put(w, work, first, second).mu, w), w)[1]
            (slope_of_mu,) = through(slope_of_mu)
        w = twins.shared(near, w) if how.strategy.moves_w else w
        new = {
            "w": inside(w, slope_of_mu, how.global_lr),
            "v": v,
            "loss": twins.nll(v, at_mu, second),
        }
        return {**work, **new}

    kept_names = ("v", "last") if how.strategy.remembers else ("v",)

    def start(message: Tree, own: Tree) -> Tree:
        work = {name: own[name] for name in kept_names}
        if how.inner_start == "global":
            work["v"] = twins.local(message)
        return {**work, "w": message, "loss": torch.zeros(())}

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        after = {**work, "last": twins.local(work["w"])}
        up = {"theta": Share(work["w"]), "loss": Share(work["loss"])}
        return up, {name: after[name] for name in kept_names}

    rows = 2 * how.batch_size if two and how.batch_size else how.batch_size
    return personal_client(
        dict.fromkeys(kept_names, twins.mine),
        lambda message, own: dict.fromkeys(kept_names, twins.local(message)),
        start=start,
        phases=(Phase(move, how.steps, batch_size=rows),),
        finish=finish,
        params=lambda message, own: {**message, **own["v"]},
    )


class MetaPoint(NamedTuple):
    """Params `w`; `ahead` and `descended` step on two batches; `remembered` adds - m (last - v)."""

    w: Params
    ahead: Callable[[Params], Params]
    descended: Callable[[Params], Params]
    remembered: Callable[[Params], Params]


class Put(NamedTuple):
    """Mu, and w as far as its gradient step alone has moved it."""

    mu: Params
    near: Params


@dataclass(frozen=True)
class Strategy:
    """A way to choose mu; where it `moves_w`, w takes the gradient step, and mu has no Jacobian in w."""

    put: Callable[[MetaPoint], Put]
    remembers: bool = False
    moves_w: bool = False


def _strategy(gradients: int, *, memory: bool, moves_w: bool = False) -> Strategy:
    """Return the strategy of 0 to 2 gradients, the first of two one step ahead, and of memory."""

    def put(at: MetaPoint) -> Put:
        ahead = at.ahead(at.w) if gradients == 2 else at.w
        near = at.descended(ahead) if gradients else at.w
        return Put(at.remembered(near) if memory else near, near)

    return Strategy(put, remembers=memory, moves_w=moves_w)


STRATEGIES: dict[str, Strategy] = {
    "none": _strategy(0, memory=False),
    "lg": _strategy(1, memory=False),
    "meg": _strategy(0, memory=True),
    "mh": _strategy(1, memory=True),
    "mh24": _strategy(2, memory=True),
    "mh-code": _strategy(2, memory=True, moves_w=True),
}


def strategy_of(word: Word | Strategy) -> Strategy:
    """Return the strategy of a name, or raise a ValueError."""
    if isinstance(word, Strategy):
        return word
    expect(strategy=(word, STRATEGIES))
    return STRATEGIES[word]
