"""pFedBayes: a mean-field posterior for each client, under a global Gaussian prior.

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

from dataclasses import replace

from hierfl.guides.mean_field import mean_field
from hierfl.method import Method
from hierfl.methods.about import About
from hierfl.methods.alternating import Alternating
from hierfl.methods.averages import by_rows
from hierfl.methods.averaging import plain_average
from hierfl.methods.prior_params import at_prior
from hierfl.optimizers import Adam, Optimizer
from hierfl.program.program import Params, Program
from hierfl.program.sites import Model


@About(
    infers="each client's mean-field posterior under a global Gaussian prior",
    source="Zhang et al. 2022, arXiv:2206.07977",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    crosses="its copy of the prior",
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
    init_scale: float | None = None,
) -> Method:
    """Return pFedBayes of a hierarchical program; clients keep their mean-field Gaussian.

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
        init_scale: standard deviation of a client's posterior before its first round; None: the
            prior's, so that the posterior is the prior until the client has used its rows.

    Raises:
        ProgramError: (at fit) the model has no local site, or nothing global to learn.
    """

    def begin(program: Program, theta: Params) -> Params:
        at, mine = at_prior(program, theta), program.start()[1]
        if init_scale is None:
            return at
        return {n: mine[n] if n.endswith(".scale") else value for n, value in at.items()}

    core = Alternating(
        loss=lambda terms, rows: terms.nll + kl_weight * terms.local_kl,
        local=optimizer,
        shared=global_optimizer,
        inner=inner_steps,
        steps=steps,
        batch_size=batch_size,
        draws=draws,
        begin=begin,
    )
    guide = mean_field if init_scale is None else mean_field(init_scale=init_scale)
    plain = Method("pfedbayes", model, guide, core.client, plain_average)
    return replace(by_rows(plain), name="pfedbayes")
