"""FedABML: a client's posterior is a few gradient steps away from the global prior.

    client:  phi <- theta, theta_i <- theta;  for every mini-batch of R passes:
                 K times  phi <- phi - lr grad_phi L(phi, theta_i)
                 theta_i <- theta_i - eta grad_theta L(phi, theta_i)      (only the KL in it depends on theta_i)
             L(phi, theta) = ( E_q nll + kl_weight KL(q_phi || p_theta) ) / n_i
             q_phi = Normal(m_i, s_i^2),  p_theta = Normal(m, s^2)
    server:  theta <- mean_i theta_i
          or theta <- argmin mean_i KL(q_phi_i || p_theta)      "exact": EM, if clients are exact; theta_i stays

Source: Liu et al. 2023, "Personalized Federated Learning via Amortized Bayesian Meta-Learning",
Algorithm 1, which has K = 1; Fig. 3 studies K. No round depends on what a client kept from an
earlier one: clients keep their last posterior for predictions only. Differences: the loss is a mean
per row, so that step sizes do not depend on the number of rows; scales are softplus of what is
learned, which is nearly the exponential below 0.1 and safer above. For the paper's exponential,
which takes 0.7 of the time, pass `scale_link="exp"` to both model and guide.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.arguments import expect
from hierfl.core.trees import add
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.about import About
from hierfl.methods.parts.averaging import (
    Descent,
    OwnParams,
    TwoLevels,
    personal_client,
    plain_average,
)
from hierfl.methods.parts.prior_params import at_prior, learned_hierarchy, moments_of
from hierfl.optimizers import SGD, Optimizer, Stepped, plain_lr, step
from hierfl.program.program import Params, Program
from hierfl.program.sites import Family, Guide, Model
from hierfl.program.traces import Terms


@About(
    infers="each client's posterior, a few gradient steps from a learned prior",
    source="Liu et al. 2023",
    common="a prior's params",
    own="sites",
    guide="mean field, a few steps from the prior",
    kept="its mean-field posterior",
    down="the prior's means and scales",
    up="`theta`: its copy of both after training; `loss`",
)
def fedabml(
    model: Model,
    guide: Guide | Family = mean_field,
    *,
    kl_weight: float = 1.0,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    global_optimizer: Optimizer | None = None,
    inner_steps: int = 1,
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
    draws: int = 5,
    meta: Literal["envelope", "first", "full"] = "envelope",
    server: Literal["average", "exact"] = "average",
) -> Method:
    """Return FedABML of a hierarchical program.

    New clients, and those that were in no cohort, are inferred by `fit.personalize(rows,
    rounds=e)`: e passes over their rows (or e times `steps` mini-batches) from theta, which stays
    as it is. Before that, predictions for them come from the prior.

    The paper's mean over clients is uniform, and its clients are of one size. With clients of
    different sizes, `by_rows(fedabml(...))` rests where the sum of the clients' ELBOs does.

    Args:
        model: local sites whose Normal prior has global params for mean and scale, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale="learned",
            scale_start=0.0067)`.
        guide: `mean_field`, or `delta` for point estimates.
        kl_weight: of the KL, lambda in the paper, which tunes it and gives no value; 1 is the ELBO.
        optimizer: of phi, started from scratch in each round; plain SGD where `meta` is not
            "envelope". Step size: the paper's for MNIST-like sets.
        global_optimizer: of the client's copy of theta, eta in the paper; None: `optimizer`. The
            paper searches one grid for both.
        inner_steps: K, steps of phi for each mini-batch.
        steps: R, passes over the rows of a round, or mini-batches (`unit`). R, batch_size and
            draws: the paper's.
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        draws: s, draws of the posterior that each gradient is averaged over.
        meta: the gradient in theta_i. "envelope": the one above, right where phi is optimal.
            "first" and "full": phi starts at theta_i for each mini-batch and the gradient goes
            through its K steps, without or with second derivatives, as Per-FedAvg's does.
        server: "average": of the clients' copies of theta, Algorithm 1. "exact": the closed-form
            minimizer of the mean KL to their posteriors, m = mean m_i and s^2 = mean [s_i^2 + (m_i
            - m)^2] (empirical Bayes by EM); `global_optimizer` is not used, and priors must be
            Normal.

    Raises:
        ProgramError: (at fit) the model has no local site, or nothing global to learn; with
            "exact", a prior that has no closed form.
        ValueError: `server` is neither "average" nor "exact"; "exact" is combined with a `meta`
            other than "envelope"; or such a `meta` with another optimizer than plain SGD.
    """
    expect(server=(server, ("average", "exact")), draws=(draws, "[1, inf)"))
    expect(inner_steps=(inner_steps, "[1, inf)"))
    if server == "exact" and meta != "envelope":
        raise ValueError(
            f"server='exact' takes no gradient in theta, and meta={meta!r} is one: leave meta at 'envelope'"
        )
    if meta != "envelope":
        plain_lr(optimizer, "optimizer", f"meta={meta!r} differentiates through gradient steps")
    exact, descent = server == "exact", Descent(optimizer, steps, unit, batch_size)
    client = partial(
        client_of,
        descent=descent,
        draws=draws,
        loss=mean_per_row(kl_weight),
        global_optimizer=global_optimizer,
        inner_steps=inner_steps,
        meta=meta,
        exact=exact,
    )

    def server_of(program: Program) -> Server:
        return moments_of(program).server(program) if exact else plain_average(program)

    return Method("fedabml", model, guide, client, server_of)


Loss = Callable[[Terms, Tensor], Tensor]  # of terms and numbers of rows, (C,)


def mean_per_row(kl_weight: float) -> Loss:
    """Return the loss (nll + kl_weight KL) / n."""
    return lambda terms, rows: (terms.nll + kl_weight * terms.local_kl) / rows


def client_of(
    program: Program,
    *,
    name: str = "fedabml",
    descent: Descent,
    loss: Loss,
    draws: int = 1,
    global_optimizer: Optimizer | None = None,
    inner_steps: int = 1,
    meta: Literal["envelope", "whole", "first", "full"] = "envelope",
    exact: bool = True,
    restarts: Literal["trained", "always", "never"] = "trained",
) -> Client:
    """Return a client, which takes steps on phi and on its copy of theta by turns; options as in `fedabml`.

    `meta` may be "whole", the gradient in theta_i of all of L at a further draw; `exact` sends moments,
    and leaves theta_i; `restarts`: later rounds begin at the prior in a fit, in `personalize` too, or never.
    """
    above, mine = learned_hierarchy(program, name)
    outer_optimizer = global_optimizer or descent.optimizer
    moments, prior = moments_of(program) if exact else None, partial(at_prior, program)
    prior(above)  # refuses a guide that cannot start at the prior before the first round

    def objective(phi: Params, theta: Params, batch: ClientBatch) -> Tensor:
        """Return L(phi, theta), ()."""

        def drawn(b: ClientBatch) -> Tensor:
            return loss(program.terms({**theta, **phi}, b), b.counts).sum()

        return over_draws(drawn, batch, draws, keyed=program.in_vmap)

    def penalty(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
        """Return the part of L that depends on theta, ()."""
        terms = program.terms({**theta, **phi}, batch)
        return loss(terms._replace(nll=torch.zeros_like(terms.nll)), batch.counts).sum()

    def started(phi: Params) -> Stepped:
        """Return phi with the first state of its optimizer."""
        return Stepped(phi, descent.optimizer.init(phi))

    def inner(phi: Stepped, theta: Params, batch: ClientBatch) -> tuple[Stepped, Tensor]:
        """Return phi after K steps, and L before the last of them."""
        value = torch.zeros(())
        for k in range(inner_steps):
            gradient, value = slope(
                partial(objective, theta=theta, batch=batch.redrawn(k)), phi.params
            )
            phi = step(descent.optimizer, gradient, phi)
        return phi, value

    def outer(theta: Params, batch: ClientBatch) -> tuple[Params, Stepped]:
        """Return the gradient of L(phi_K(theta), theta) in theta, and phi_K."""
        last = batch.redrawn(inner_steps)
        phi, _ = inner(started(prior(theta)), theta, batch)
        if meta == "full":

            def through(t: Params) -> Tensor:
                phi, _ = inner(started(prior(t)), t, batch)
                return objective(phi.params, t, last)

            return grad(through)(theta), phi
        by_phi, by_theta = grad(objective, (0, 1))(phi.params, theta, last)
        return add(by_theta, vjp(prior, theta)[1](by_phi)[0]), phi

    def start(message: Params, own: OwnParams) -> TwoLevels:
        theta = Stepped(message, outer_optimizer.init(message))
        phi = prior(message) if restarts == "always" else own.params
        return TwoLevels(theta, started(phi), torch.zeros(()))

    def restart(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
        return work._replace(phi=started(prior(message)))

    def move(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
        theta, after = work.theta.params, batch.redrawn(inner_steps)
        if meta == "envelope":
            phi, value = inner(work.phi, theta, batch)
            if exact:
                return TwoLevels(work.theta, phi, value)
            gradient = grad(penalty)(theta, phi.params, after)
        elif meta == "whole":
            phi, _ = inner(work.phi, theta, batch)
            gradient, value = slope(lambda t: objective(phi.params, t, after), theta)
        else:
            gradient, phi = outer(theta, batch)
            value = objective(phi.params, theta, after)
        return TwoLevels(step(outer_optimizer, gradient, work.theta), phi, value)

    def tune(work: TwoLevels, message: Params, batch: ClientBatch) -> TwoLevels:
        phi, value = inner(work.phi, message, batch)
        return TwoLevels(work.theta, phi, value)

    def finish(
        work: TwoLevels, message: Params, own: OwnParams, rows: Tensor
    ) -> tuple[Up, OwnParams]:
        phi, up = work.phi.params, {"loss": Share(work.loss)}
        if moments is None:
            up["theta"] = Share(work.theta.params)
        else:
            up["moments"] = Share(moments.of(phi, message))
        return up, OwnParams(phi, torch.ones(()))

    descent = replace(descent, turns=inner_steps * draws)
    passes = 1 if descent.unit == "epoch" else descent.steps
    again = (Phase(restart, batch_size=1, scores_rows=False),) if restarts == "trained" else ()
    return personal_client(
        OwnParams(mine, torch.zeros(())),
        lambda message, own: own._replace(params=prior(message)),
        start=start,
        phases=(*again, descent.taking(move)),
        finish=finish,
        params=lambda message, own: {**message, **own.params},
        adapt=(descent.taking(tune, passes),),
    )
