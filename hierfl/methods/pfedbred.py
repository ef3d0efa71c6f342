"""pFedBreD: personalised models held near a prior mean that each client moves towards itself, by a Bregman divergence.

    client:  w <- theta;  for every mini-batch:
                 mu <- where the strategy puts it
                 K times  v <- v - lr grad_v [ nll(v) + lam D(v, mu) ]
                 w <- w - eta lam (mu - v)                                  ~ grad_w lam D(v, mu(w))
    server:  theta <- mean_k w_k

    none    mu = w                                             (pFedMe)
    lg      mu = w - a grad nll(w)
    meg     mu = w - m (last - v)                              last: the client's own w at the end of its last round
    mh      mu = w - a grad nll(w) - m (last - v)
    mh24    mu = w - a grad nll(w - a grad nll(w)) - m (last - v)
    mh-code mh24 with a mini-batch for each gradient, and w itself takes the first of its two steps

Source: Shi et al. 2023, arXiv:2310.09183, Algorithm 1, Eq. (14), and Eq. (24) for mh24; mh-code is what the authors' code does
under the name mh. All of it moves in natural parameters, by gradients in the means (mirror steps), so that values stay where they
are defined; for a Gaussian of unit precision the two are one. There d D(v, mu(s)) / ds = mu - v exactly, and the approximation
left is d mu / d w = 1: `jacobian="exact"` does without it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import transform_to
from torch.func import grad, vjp

from hierfl.core.trees import Tree, sub, tree_map
from hierfl.data.batch import ClientBatch, halves
from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Phase, Server, Share, Up, slope
from hierfl.methods.averaging_server import averaging_server
from hierfl.methods.mirror import inside_of_params
from hierfl.methods.old_options import AVERAGED, BETA, BY_ROWS, FINE_TUNE_OF_PFEDBRED, old_options
from hierfl.methods.prior_params import paired
from hierfl.models.bregman import keep_inside
from hierfl.program.program import Params, Program
from hierfl.program.recipes import recorded
from hierfl.program.sites import Model

Strategy = Literal["none", "lg", "meg", "mh", "mh24", "mh-code"]


@old_options(by_rows=BY_ROWS, averaged=AVERAGED, fine_tune=FINE_TUNE_OF_PFEDBRED, beta=BETA)
@recorded
def pfedbred(
    model: Model,
    strategy: Strategy = "mh",
    *,
    lam: float = 15.0,
    lr: float = 0.01,
    eta: float = 0.01,
    gradient_step: float = 0.01,
    memory_step: float = 0.05,
    prox_steps: int = 5,
    steps: int = 20,
    batch_size: int | None = 20,
    prox_start: Literal["own", "global", "moved"] = "own",
    jacobian: Literal["identity", "exact"] = "identity",
) -> Method:
    """PFedBreD of a hierarchical program, by point estimates.

    Args:
        model: local sites whose prior's mean is a global param each: `hierfl.models.bayesian_network(module, prior_scale=1.0)`, the
            Gaussian of the paper's experiments, or `hierfl.models.bregman_network(module, prior)`.
        strategy: how mu is chosen.
        lam: weight of the divergence, beside the mean negative log likelihood of a row: the paper's 15 to 60.
        lr: step size of the personalised model v; alpha, lr, eta, the meta steps, K, R and batch_size: the paper's.
        eta: step size of the client's copy w of the global model; alpha_m.
        gradient_step: a; eta_alpha in the paper.
        memory_step: m; eta in the paper.
        prox_steps: K, steps on each mini-batch.
        steps: R, mini-batches a round.
        batch_size: rows a mini-batch; None: all. mh-code takes two at a step.
        prox_start: where the K steps start: "own": at v as it was left, rounds apart too (Algorithm 1); "global": the same, but
            at theta in a round's first step (pFedMe's code); "moved": at w after its gradient step, each time (their code).
        jacobian: of mu(w): taken for 1, or exact, by a derivative through the strategy's gradient.

    Raises:
        ProgramError: the model has no local site, or one whose prior's mean is no global param.
        ValueError: an unknown strategy, or an exact Jacobian of mh-code, whose w is not what mu is a
            function of.
    """
    if strategy not in ("none", "lg", "meg", "mh", "mh24", "mh-code"):
        raise ValueError(f"there is no strategy '{strategy}': none, lg, meg, mh, mh24 or mh-code")
    if strategy == "mh-code" and jacobian == "exact":
        raise ValueError("mh-code moves w itself, and has no Jacobian: take mh24 for an exact one")
    remembers, twice = strategy in ("meg", "mh", "mh24", "mh-code"), strategy == "mh-code"

    def client(program: Program) -> Client:
        mine = program.start()[1]
        twins = paired(program)
        to_mean = {f"{site.name}.at": site.transform for site in program.latents.local_block.sites}

        def own_of(w: Params) -> Params:
            return {name: w[twin].view(mine[name].shape) for name, twin in twins.items()}

        def shared_of(v: Params, w: Params) -> Params:
            return {**w, **{twin: v[name].view(w[twin].shape) for name, twin in twins.items()}}

        def nll(v: Params, w: Params, batch: ClientBatch) -> Tensor:
            return (program.terms({**w, **v}, batch).nll / batch.counts).sum()

        def objective(v: Params, mu: Params, batch: ClientBatch) -> Tensor:
            terms = program.terms({**mu, **v}, batch)
            return (terms.nll / batch.counts + lam * terms.local_kl).sum()

        def stepped(
            loss: Any, v: Params, rate: float, at: Params | None = None
        ) -> tuple[Params, Tensor]:
            """V after a mirror step on a loss, whose gradient is taken at v or elsewhere; and the loss."""
            means = {
                name: to_mean[name](value) for name, value in (v if at is None else at).items()
            }
            gradient, value = slope(
                lambda x: loss({name: to_mean[name].inv(x[name]) for name in x}), means
            )
            return moved(v, gradient, rate), value

        def moved(v: Params, by: Params, rate: float) -> Params:
            return {
                name: keep_inside(to_mean[name].domain, v[name] - rate * by[name], v[name])
                for name in v
            }

        def prior_mean(
            w: Params, lane: Tree, first: ClientBatch, second: ClientBatch
        ) -> tuple[Params, Params]:
            """Mu, and w as far as its gradient step alone has moved it, both as own params."""
            middle = near = own_of(w)
            if strategy in ("mh24", "mh-code"):
                ahead, _ = stepped(partial(nll, w=w, batch=first), middle, gradient_step)
                near, _ = stepped(partial(nll, w=w, batch=second), middle, gradient_step, at=ahead)
            elif strategy in ("lg", "mh"):
                near, _ = stepped(partial(nll, w=w, batch=second), middle, gradient_step)
            if not remembers:
                return near, near
            return moved(near, sub(lane["last"], lane["v"]), memory_step), near

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            first, second = (
                halves(batch, batch_size) if twice and batch_size is not None else (batch, batch)
            )
            w, v = lane["w"], lane["v"]
            mu, near = prior_mean(w, lane, first, second)
            at_mu, v = shared_of(mu, w), near if prox_start == "moved" else v
            for _ in range(prox_steps):
                v, _ = stepped(partial(objective, mu=at_mu, batch=second), v, lr)
            slope_of_mu = grad(lambda mu: objective(v, mu, second))(at_mu)
            if jacobian == "exact":
                through = vjp(lambda w: shared_of(prior_mean(w, lane, first, second)[0], w), w)[1]
                (slope_of_mu,) = through(slope_of_mu)
            w = shared_of(near, w) if twice else w
            return {
                **lane,
                "w": within(w, slope_of_mu),
                "v": v,
                "loss": nll(v, at_mu, second),
            }

        domains = {
            spec.name: transform_to(spec.constraint).domain
            for spec in program.params
            if not spec.is_local
        }

        def within(w: Params, by: Params) -> Params:
            return {
                name: keep_inside(domains[name], value - eta * by[name], value)
                for name, value in w.items()
            }

        def start(message: Tree, own: Tree) -> Tree:
            kept = {"v": own["v"], "last": own["last"]} if remembers else {"v": own["v"]}
            new = {name: own_of(message) for name in kept}
            lane = tree_map(
                lambda old, fresh: torch.where(own["seen"] > 0.0, old, fresh), kept, new
            )
            if prox_start == "global":
                lane["v"] = own_of(message)
            return {
                **lane,
                "w": message,
                "loss": torch.zeros(()),
            }

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up = {"theta": Share(lane["w"]), "loss": Share(lane["loss"])}
            keeps = {**lane, "last": own_of(lane["w"]), "seen": torch.ones(())}
            return up, {name: keeps[name] for name in own}

        def params(message: Tree, own: Tree) -> Params:
            new = own_of(message)
            return {
                **message,
                **{name: torch.where(own["seen"] > 0.0, own["v"][name], new[name]) for name in new},
            }

        own: dict[str, Any] = {"v": mine, "seen": torch.zeros(())}
        own |= {"last": mine} if remembers else {}
        rows = 2 * batch_size if twice and batch_size is not None else batch_size
        phases = (Phase(move, steps, batch_size=rows),)
        return Client(own, start, phases, finish, params, seen=lambda own: own["seen"])

    def server(program: Program) -> Server:
        return averaging_server(program.start()[0], inside=partial(inside_of_params, program))

    return Method("pfedbred", model, delta, client, server)
