"""pFedBreD: personalized models under a Bregman prior whose mean each client moves toward itself.

    client:  w <- theta;  for every mini-batch:
                 mu <- where the strategy puts it                           (`pfedbred_strategies`)
                 K times  v <- v - lr grad_v [ nll(v) + prox D(v, mu) ]
                 w <- w - eta prox (mu - v)                      ~ grad_w prox D(v, mu(w))
    server:  theta <- mean_k w_k

Source: Shi et al. 2023, arXiv:2310.09183, Algorithm 1, Eq. (14). All of it moves in natural
parameters, by gradients in the means (mirror steps), so that values stay where they are defined;
for a Gaussian of unit precision the two are one. There d D(v, mu(s)) / ds = mu - v exactly, and the
approximation left is d mu / d w = 1: `jacobian="exact"` does without it.

The paper's "+FT" and "+AM" are `fine_tuned(..., when="every round", mirror=True)` and
`over_relaxed`. In its Algorithm 1, as in the authors' code, all clients train and S of N are
averaged: `averaging_some(..., share=S / N)`. Their code weights clients by rows, `by_rows`; the
paper's mean is uniform.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from hierfl.guides.delta import delta
from hierfl.method import Client, Method, Server
from hierfl.methods.about import About
from hierfl.methods.averaging_server import averaging_server
from hierfl.methods.mirror import domains_of_params, kept_inside
from hierfl.methods.pfedbred_client import Setting, bred_client
from hierfl.methods.pfedbred_strategies import Strategy, Word, strategy_of
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Program
from hierfl.program.sites import Model


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
    new="the same steps",
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
    how = Setting(
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

    def client(program: Program) -> Client:
        return bred_client(program, how)

    def server(program: Program) -> Server:
        inside = partial(kept_inside, domains_of_params(program))
        return averaging_server(program.start()[0], inside=inside)

    return Method("pfedbred", model, delta, client, server)
