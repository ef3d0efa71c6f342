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

from __future__ import annotations

from typing import Literal

from hierfl.core.trees import Tree
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Server
from hierfl.methods.about import About
from hierfl.methods.averaging_server import averaging_server
from hierfl.methods.fedabml_client import Setting, abml_client
from hierfl.methods.prior_params import moments_of
from hierfl.optimizers import SGD, Optimizer, plain_lr
from hierfl.program.program import Params, Program
from hierfl.program.sites import Family, Guide, Model


@About(
    infers="each client's posterior, a few gradient steps from a learned prior",
    source="Liu et al. 2023",
    common="a prior's params",
    own="sites",
    guide="mean field, a few steps from the prior",
    kept="its mean-field posterior",
    crosses="its copy of the prior",
    new="the same steps",
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
    if server not in ("average", "exact"):
        raise ValueError(f"server is {server!r}; it must be 'average' or 'exact'")
    if server == "exact" and meta != "envelope":
        raise ValueError(
            f"server='exact' takes no gradient in theta, and meta={meta!r} is one: leave meta at "
            "'envelope'"
        )
    if meta != "envelope":
        plain_lr(optimizer, "optimizer", f"meta={meta!r} differentiates through gradient steps")
    exact = server == "exact"
    how = Setting(
        kl_weight=kl_weight,
        optimizer=optimizer,
        global_optimizer=global_optimizer or optimizer,
        inner_steps=inner_steps,
        steps=steps,
        unit=unit,
        batch_size=batch_size,
        draws=draws,
        meta=meta,
        exact=exact,
    )

    def client(program: Program) -> Client:
        return abml_client(program, how)

    def server_of(program: Program) -> Server:
        return _exact_server(program) if exact else averaging_server(program.start()[0])

    return Method("fedabml", model, guide, client, server_of)


def _exact_server(program: Program) -> Server:
    """Return the server that moves to the prior which fits the clients' posteriors best."""
    moments = moments_of(program)

    def best(theta: Params, means: dict[str, Tree]) -> Params:
        return moments.best(theta, means["moments"])

    return averaging_server(program.start()[0], best)
