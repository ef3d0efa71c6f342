"""FedABML: a client's posterior is what a few gradient steps from the global prior make of it.

    client:  phi <- theta, theta_i <- theta;  for every mini-batch of R passes:
                 K times  phi <- phi - lr grad_phi L(phi, theta_i)
                 theta_i <- theta_i - eta grad_theta L(phi, theta_i)      (its KL alone depends on theta_i)
             L(phi, theta) = ( E_q nll + lam KL(q_phi || p_theta) ) / n_i,   q_phi = Normal(m_i, s_i^2), p_theta = Normal(m, s^2)
    server:  theta <- mean_i theta_i
          or theta <- argmin mean_i KL(q_phi_i || p_theta)      "exact": with exact clients this is EM, and theta_i is not moved

Source: Liu et al. 2023, "Personalized Federated Learning via Amortized Bayesian Meta-Learning", Algorithm 1, which has K = 1;
Fig. 3 studies K. No round depends on what a client kept from an earlier one: it keeps its last posterior to be
served by. Differences: the loss is a mean per row, so that step sizes do not depend on how many there are; scales are softplus of
what is learned, hardly another number below 0.1 and safer above, unless both model and guide are told `scale_link="exp"`, the
paper's, which takes 0.7 of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from hierfl.core.trees import Tree, add, scaled, sub, tree_map
from hierfl.data.batch import ClientBatch
from hierfl.guides.mean_field import mean_field
from hierfl.method import Client, Method, Phase, Server, Share, Up, over_draws, slope
from hierfl.methods.fedabml_server import abml_server
from hierfl.methods.old_options import BETA, BY_ROWS, old_options
from hierfl.methods.prior_params import at_prior, moments_of
from hierfl.program.program import Params, Program, ProgramError
from hierfl.program.recipes import recorded
from hierfl.program.sites import Family, Guide, Model


@old_options(by_rows=BY_ROWS, beta=BETA)
@recorded
def fedabml(
    model: Model,
    guide: Guide | Family = mean_field,
    *,
    lam: float = 1.0,
    lr: float = 0.01,
    eta: float | None = None,
    inner_steps: int = 1,
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
    draws: int = 5,
    meta: Literal["envelope", "first", "full"] = "envelope",
    server: Literal["average", "exact"] = "average",
) -> Method:
    """FedABML of a hierarchical program.

    New clients, and those that had no turn, are inferred by `fit.personalise(rows, rounds=e)`: e passes over their rows (or times
    `steps` mini-batches) from theta, which stays; before that they are served by the prior itself.

    Args:
        model: local sites whose Normal prior has global params for mean and scale, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale="learned", scale_start=0.0067)`.
        guide: `mean_field`, or `delta` for the point that A1 and A3 of the tests are about.
        lam: weight of the KL; 1 is the ELBO. The paper tunes it and gives no value.
        lr: step size of phi; the paper's 0.01 for MNIST-like sets.
        eta: step size of the client's copy of theta; None: `lr`, the paper's one grid for both.
        inner_steps: K, steps of phi for each mini-batch.
        steps: R, passes over the rows a round, or mini-batches (`unit`). R, batch_size and draws: the paper's.
        unit: "epoch" or "step".
        batch_size: rows a mini-batch; None: all.
        draws: s, of the posterior, a step.
        meta: "envelope": the gradient above, right where phi is optimal; "first" and "full": phi starts at theta_i for each
            mini-batch, and the gradient goes through its K steps, without or with second derivatives, as Per-FedAvg's does.
        server: "average": of the clients' copies of theta, Algorithm 1; "exact": the closed-form minimiser of the mean KL to their
            posteriors, m = mean m_i and s^2 = mean [s_i^2 + (m_i - m)^2] (empirical Bayes by EM): no eta, and Normal priors alone.

    Raises:
        ProgramError: the model has no local site, or nothing global to learn; with "exact", a prior it has no closed form for.
        ValueError: another server, or "exact" together with a gradient through the steps.
    """
    eta = lr if eta is None else eta
    if server not in ("average", "exact"):
        raise ValueError(f"server is {server!r}; it must be 'average' or 'exact'")
    if server == "exact" and meta != "envelope":
        raise ValueError(
            "server='exact' takes no gradient of theta, and meta is one: leave meta at 'envelope'"
        )

    def client(program: Program) -> Client:
        above, mine = program.start()
        if not mine or not above:
            raise ProgramError(
                "fedabml needs local sites, and a learned prior above them: a pyro.param outside the clients plate"
            )
        prior = partial(at_prior, program)
        moments = moments_of(program) if server == "exact" else None
        prior(above)  # a guide that cannot start there is named now, not in a client's first step

        def loss(phi: Params, theta: Params, batch: ClientBatch) -> Tensor:
            def one(b: ClientBatch) -> Tensor:
                terms = program.terms({**theta, **phi}, b)
                return ((terms.nll + lam * terms.local_kl) / b.counts).sum()

            return over_draws(one, batch, draws, keyed=program.keyed)

        def penalty(theta: Params, phi: Params, batch: ClientBatch) -> Tensor:
            return (lam * program.terms({**theta, **phi}, batch).local_kl / batch.counts).sum()

        def inner(phi: Params, theta: Params, batch: ClientBatch) -> tuple[Params, Tensor]:
            value = torch.zeros(())
            for k in range(inner_steps):
                gradient, value = slope(partial(loss, theta=theta, batch=batch.redrawn(k)), phi)
                phi = sub(phi, scaled(gradient, lr))
            return phi, value

        def outer(theta: Params, batch: ClientBatch) -> tuple[Params, Params]:
            """Gradient of L(phi_K(theta), theta) in theta, and phi_K."""
            last = batch.redrawn(inner_steps)
            phi, _ = inner(prior(theta), theta, batch)
            if meta == "full":
                return grad(lambda t: loss(inner(prior(t), t, batch)[0], t, last))(theta), phi
            by_phi, by_theta = grad(loss, (0, 1))(phi, theta, last)
            return add(by_theta, vjp(prior, theta)[1](by_phi)[0]), phi

        def start(message: Tree, own: Tree) -> Tree:
            phi = tree_map(
                lambda kept, new: torch.where(own["seen"] > 0.0, kept, new),
                own["phi"],
                prior(message),
            )
            return {"theta": message, "phi": phi, "loss": torch.zeros(())}

        def restart(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            return {**lane, "phi": prior(message)}

        def move(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            if meta == "envelope":
                phi, value = inner(lane["phi"], lane["theta"], batch)
                if moments is not None:
                    return {**lane, "phi": phi, "loss": value}
                gradient = grad(penalty)(lane["theta"], phi, batch.redrawn(inner_steps))
            else:
                gradient, phi = outer(lane["theta"], batch)
                value = loss(phi, lane["theta"], batch.redrawn(inner_steps))
            return {"theta": sub(lane["theta"], scaled(gradient, eta)), "phi": phi, "loss": value}

        def tune(lane: Tree, message: Tree, batch: ClientBatch) -> Tree:
            phi, value = inner(lane["phi"], message, batch)
            return {**lane, "phi": phi, "loss": value}

        def finish(lane: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up = {"loss": Share(lane["loss"])}
            if moments is None:
                up["theta"] = Share(lane["theta"])
            else:
                up["moments"] = Share(moments.of(lane["phi"], message))
            return up, {"phi": lane["phi"], "seen": torch.ones(())}

        return Client(
            own={"phi": mine, "seen": torch.zeros(())},
            start=start,
            phases=(Phase(restart, batch_size=1), Phase(move, steps, unit, batch_size)),
            finish=finish,
            params=lambda message, own: {**message, **start(message, own)["phi"]},
            adapt=(Phase(tune, 1 if unit == "epoch" else steps, unit, batch_size),),
            seen=lambda own: own["seen"],
        )

    def server_of(program: Program) -> Server:
        return abml_server(program, exact=server == "exact")

    return Method("fedabml", model, guide, client, server_of)
