"""Alternating steps: per mini-batch, K on local params and one on a copy of the global ones.

A client that joins later takes the K steps alone, at the server's global params. pFedMe is this
with a delta guide, and pFedBayes with a mean-field one.

pFedMe: personalized models that are pulled toward a local copy of the global one.

    client:  w <- theta, v <- theta;  for every mini-batch:
                 K times  v <- v - lr grad_v [ nll(v) + prox D(v, w) ]
                 w <- w - eta grad_w prox D(v, w)
    server:  theta <- mean_k w_k

Source: T. Dinh et al. 2020, arXiv:2006.08848, Algorithm 1; its beta is that of `over_relaxed`. In a
program v is the client's own site, w its prior's mean, and D = |v - w|^2 / 2 minus the log density
of a prior of unit scale, constants apart; another prior gives another D. As in the paper the mean
over clients is uniform (its code weights by rows: `by_rows`); as in its code a round's first prox
starts at the global model.

pFedBayes: a mean-field posterior for each client, under a global Gaussian prior.

    client:  theta_k <- theta;  q_k <- theta in its first round, later its last q_k
             for every mini-batch of b rows:
                 K Adam steps on q_k of  (n_k / b) E_q NLL_batch + zeta KL(q_k || p_theta_k)
                 one Adam step on theta_k of the same (only its KL depends on theta_k)
    server:  theta <- sum_k (n_k / n) theta_k

Source: Zhang et al. 2022, arXiv:2206.07977, Algorithm 1. Averaging means and unconstrained scales
is the paper's rule; it is no product of posteriors. Differences from the public port: noise of
standard deviation 1 (there 0.001, in effect a point estimate), and a mini-batch scaled to the size
of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.guides.delta import delta
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Phase, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import OwnParams, TwoLevels, personal_client, plain_average
from hierfl.methods.parts.prior_params import at_prior, learned_hierarchy
from hierfl.methods.wrappers.averages import by_rows
from hierfl.optimizers import SGD, Adam, Optimizer, Stepped, step
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model
from hierfl.program.terms import Terms


@dataclass(frozen=True)
class Alternating:
    """The choices in which these methods differ; both kinds of step descend `loss`."""

    loss: Callable[[Terms, Tensor], Tensor]  # of terms and numbers of rows, (C,)
    local: Optimizer  # of the local params, restarted in each round
    shared: Optimizer  # of the client's copy of the global params, likewise
    inner: int  # K, steps on local params for each mini-batch
    steps: int  # R, mini-batches of a round
    batch_size: int | None
    draws: int = 1  # S, of the guide, that each gradient is averaged over
    restarts: bool = False  # whether every round, not only the first, begins at the prior

    def client(self, program: Program) -> Client:
        """Return the client of one program."""
        above, mine = learned_hierarchy(program, "this method")

        def loss(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
            def at(b: ClientBatch) -> Tensor:
                return self.loss(program.terms({**theta, **phi}, b), b.counts)

            return over_draws(at, batch, self.draws, keyed=program.in_vmap)

        at_prior(program, above)  # refuses a guide that cannot start there before the first round

        def start(message: Params, own: OwnParams) -> TwoLevels:
            phi = at_prior(program, message) if self.restarts else own.params
            theta = Stepped(message, self.shared.init(message))
            return TwoLevels(theta, Stepped(phi, self.local.init(phi)), torch.zeros(()))

        def inner(theta: Params, phi: Stepped, batch: ClientBatch) -> tuple[Stepped, Tensor]:
            value = torch.zeros(())
            for k in range(self.inner):
                gradient, value = slope(partial(loss, theta, batch=batch.redrawn(k)), phi.params)
                phi = step(self.local, gradient, phi)
            return phi, value

        def tune(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            phi, value = inner(message, work.phi, batch)
            return TwoLevels(work.theta, phi, value)

        def move(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
            theta = work.theta
            phi, _ = inner(theta.params, work.phi, batch)
            gradient, value = slope(
                lambda p: loss(p, phi.params, batch.redrawn(self.inner)), theta.params
            )
            return TwoLevels(step(self.shared, gradient, theta), phi, value)

        def finish(
            work: TwoLevels, message: Params, own: OwnParams, rows: Tensor
        ) -> tuple[Up, OwnParams]:
            up = {"theta": Share(work.theta.params), "loss": Share(work.loss)}
            return up, OwnParams(work.phi.params, torch.ones(()))

        return personal_client(
            OwnParams(mine, torch.zeros(())),
            lambda message, own: own._replace(params=at_prior(program, message)),
            start=start,
            phases=(Phase(move, self.steps, batch_size=self.batch_size),),
            finish=finish,
            params=lambda message, own: {**message, **own.params},
            adapt=(Phase(tune, self.steps, batch_size=self.batch_size),),
        )


@About(
    infers="each client's point estimate near a local copy of the global model",
    source="T. Dinh et al. 2020, arXiv:2006.08848",
    common="a prior mean",
    own="weights",
    kept="its weights",
    new="proximal steps",
    down="the prior's means",
    up="`theta`: its copy of them after training; `loss`",
)
def pfedme(
    model: Model,
    *,
    prox: float = 15.0,
    optimizer: Optimizer = SGD(0.1),  # noqa: B008 (frozen)
    global_optimizer: Optimizer = SGD(0.005),  # noqa: B008
    inner_steps: int = 5,
    steps: int = 20,
    batch_size: int | None = 20,
) -> Method:
    """Return pFedMe of a hierarchical program, by point estimates.

    Args:
        model: local sites of unit prior scale whose mean is a global param, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale=1.0)`.
        prox: weight of the prior, beside the mean negative log likelihood of a row; lambda in the
            paper. All defaults: the authors' README.
        optimizer: of the personalized model, alpha in the paper; started from scratch in each
            round.
        global_optimizer: of the client's copy of the global model, eta in the paper; likewise.
        inner_steps: K, steps of the personalized model on each mini-batch.
        steps: R, mini-batches of a round.
        batch_size: rows of a mini-batch; None: all.

    Raises:
        ProgramError: (at fit) the model has no local site, or nothing global to learn.
    """
    core = Alternating(
        loss=lambda terms, rows: terms.nll / rows + prox * terms.local_kl,
        local=optimizer,
        shared=global_optimizer,
        inner=inner_steps,
        steps=steps,
        batch_size=batch_size,
        restarts=True,
    )
    return Method("pfedme", model, delta, core.client, plain_average)


@About(
    infers="each client's mean-field posterior under a global Gaussian prior",
    source="Zhang et al. 2022, arXiv:2206.07977",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    new="fits its posterior",
    down="the prior's means and scales",
    up="`theta`*: its copy of both after training; `loss`*",
)
def pfedbayes(
    model: Model,
    *,
    kl_weight: float = 10.0,
    optimizer: Optimizer = Adam(0.001),  # noqa: B008 (frozen)
    global_optimizer: Optimizer = Adam(0.001),  # noqa: B008
    inner_steps: int = 5,
    steps: int = 20,
    batch_size: int | None = 100,
    draws: int = 1,
) -> Method:
    """Return pFedBayes of a hierarchical program; clients keep their mean-field Gaussian.

    A client's posterior is the prior until the client has used its rows.

    Args:
        model: local sites whose Normal prior has global params for mean and scale, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale="learned")`.
        kl_weight: of the KL, zeta in the paper; 1 is the ELBO. All defaults but that of draws: the
            public port's.
        optimizer: of the posterior's params, restarted in each round.
        global_optimizer: of the client's copy of the prior's params, likewise.
        inner_steps: K, steps of the posterior on each mini-batch.
        steps: R, mini-batches of a round.
        batch_size: rows of a mini-batch; None: all.
        draws: S, draws of the posterior that each gradient is averaged over.

    Raises:
        ProgramError: (at fit) the model has no local site, or nothing global to learn.
    """
    core = Alternating(
        loss=lambda terms, rows: terms.nll + kl_weight * terms.local_kl,
        local=optimizer,
        shared=global_optimizer,
        inner=inner_steps,
        steps=steps,
        batch_size=batch_size,
        draws=draws,
    )
    plain = Method("pfedbayes", model, mean_field, core.client, plain_average)
    return replace(by_rows(plain), name="pfedbayes")
