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

from dataclasses import replace
from functools import partial

from hierfl.guides.delta import delta
from hierfl.guides.mean_field import mean_field
from hierfl.method import Method
from hierfl.methods.about import About
from hierfl.methods.fedabml import client_of
from hierfl.methods.parts.averaging import Descent, plain_average
from hierfl.methods.wrappers.averages import by_rows
from hierfl.optimizers import SGD, Adam, Optimizer
from hierfl.program.sites import Model


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
    client = partial(
        client_of,
        name="this method",
        descent=Descent(optimizer, steps, "step", batch_size),
        loss=lambda terms, rows: terms.nll / rows + prox * terms.local_kl,
        global_optimizer=global_optimizer,
        inner_steps=inner_steps,
        meta="whole",
        exact=False,
        restarts="always",
    )
    return Method("pfedme", model, delta, client, plain_average)


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
    client = partial(
        client_of,
        name="this method",
        descent=Descent(optimizer, steps, "step", batch_size),
        draws=draws,
        loss=lambda terms, rows: terms.nll + kl_weight * terms.local_kl,
        global_optimizer=global_optimizer,
        inner_steps=inner_steps,
        meta="whole",
        exact=False,
        restarts="never",
    )
    plain = Method("pfedbayes", model, mean_field, client, plain_average)
    return replace(by_rows(plain), name="pfedbayes")
