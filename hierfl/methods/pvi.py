"""Partitioned variational inference with Gaussian factors, which clients keep; also of hierarchies.

    q(z) = t_0(z) prod_k t_k(z),    t_0 approximates the prior, t_k the likelihood of client k

    client:  q_k = argmax E_q[l_k(z)] - KL(q || q_old / t_k),    t_k <- t_k (q_k / q_old)^delta
    server:  q <- q prod_k (q_k / q_old)^delta

Local sites are integrated out by Laplace's method, so that l_k is the client's log marginal
likelihood. With known Gaussian variances t_k is then hierarchical PVI's message to phi, N(m_t; phi,
V_t + L), and the result is exact after one visit to each client. The argmax is found by
natural-gradient steps on quasi-random points; one step is exact where l_k is quadratic.

Sources: Bui et al. 2018, arXiv:1811.11206, Algorithm 1; Ashman et al. 2022, arXiv:2202.12275; their
code's HPVIServer. Differences: second derivatives instead of Adam; any hierarchy instead of one
Gaussian layer with known variance; for a prior that is not Gaussian in unconstrained values the
server keeps a factor, renewed in each round.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.importance_sampling import normal_points
from hierfl.core.trees import Tree, sub
from hierfl.data.batch import ClientBatch
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Marginal, check_integrable
from hierfl.method import Client, Method, Phase, Server, Up
from hierfl.methods.about import About
from hierfl.methods.natural_factors import (
    check_visits,
    factor_guide,
    factor_server,
    guess,
    newton_step,
    no_factor,
    nowhere,
    shaped,
    visited,
)
from hierfl.program.program import Program
from hierfl.program.sites import Model

NEWTON = 6  # steps to the mode of the local sites
AT_ONCE = 32  # points evaluated together


@About(
    infers="a Gaussian factor per client, refined by visits",
    source="Ashman et al. 2022, arXiv:2202.12275",
    common="sites",
    own="sites with modes",
    guide="a Gaussian",
    kept="its Gaussian factor; mode of the local sites",
    crosses="the change of its factor",
    new="one round: its own mode",
    down="the global Gaussian",
    up="the change of its factor: `shift`, (K,); `precision`, (K, K); `improper`, one scalar",
)
def pvi(
    model: Model,
    *,
    factors: Literal["full", "diagonal"] = "full",
    damping: float | None = None,
    steps: int = 3,
    draws: int = 16,
    max_global_size: int = 300,
) -> Method:
    """Return PVI of a program with few global sites; with local sites, hierarchical PVI.

    Cohorts of one client are its sequential schedule, cohorts of all clients its synchronous one.

    The published algorithm shows the server each client's factor. Here the server needs only their
    sums (`Method.discloses`).

    Args:
        model: as for `fedlaplace`.
        factors: covariance of the Gaussian factors, "full" or "diagonal".
        damping: delta, in (0, 1]; None: 1 / N, with which q is always proper. 1 is exact in one
            visit where all is Gaussian.
        steps: natural-gradient steps of a visit, 1 or more.
        draws: quasi-random draws of q that each step averages over, even.
        max_global_size: largest K, the number of global unknowns.

    Raises:
        ValueError: `damping` is outside (0, 1], `draws` is odd or below 2, or `steps` is below 1;
            (during a fit) q is not a distribution, because damping was too large.
        ProgramError: (at fit) a local site cannot be integrated by Laplace's method; or K is above
            `max_global_size`.
    """
    check_visits(damping, draws, steps)
    full = factors == "full"

    def client(program: Program) -> Client:
        check_integrable(program, max_global_size)
        standard = normal_points(draws, program.latents.global_block.size, seed=program.seed)
        delta = program.share if damping is None else damping
        marginal = Marginal(program, seen_linear(program))
        return _client(marginal, standard, delta=delta, steps=steps, full=full)

    def server(program: Program) -> Server:
        check_integrable(program, max_global_size)
        standard = normal_points(draws, program.latents.global_block.size, seed=program.seed)
        return factor_server(Marginal(program), standard, full=full)

    return Method(
        "pvi", model, factor_guide(full=full), client, server, traits=frozenset({"by rows"})
    )


def _client(
    marginal: Marginal, standard: Tensor, *, delta: float, steps: int, full: bool
) -> Client:
    size = marginal.shared.size

    def step(work: Tree, message: Tree, batch: ClientBatch) -> Tree:
        """Take a natural-gradient step to q_k: precision <- cavity's - E[l''], mean by Newton."""
        q, cavity = work["q"], sub(message, work["factor"])

        with torch.no_grad():
            covariance = torch.linalg.inv_ex(q["precision"]).inverse
            loc = covariance @ q["shift"]
            at = loc + standard @ torch.linalg.cholesky_ex(covariance).L.T
            found, inner = torch.vmap(
                lambda z: marginal.expand(z, guess(work["near"], z), batch, NEWTON),
                chunk_size=AT_ONCE,
            )(at)
            gradient, hessian = found.gradient.mean(0), found.hessian.mean(0)
            precision, mean, proper = newton_step(q, loc, gradient, hessian, cavity)
            precision = shaped(precision, full)
            new = {"shift": precision @ mean, "precision": precision}
        return {
            "q": {name: torch.where(proper, value, q[name]) for name, value in new.items()},
            "near": {"mode": inner.mode.mean(0), "slope": inner.slope.mean(0), "loc": at.mean(0)},
            "factor": work["factor"],
            "improper": 1.0 - proper.to(loc.dtype),
        }

    def finish(work: Tree, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
        return visited(work, message, own, delta)

    return Client(
        own={"factor": no_factor(size), "near": nowhere(marginal)},
        start=lambda message, own: {"q": message, **own, "improper": torch.zeros(())},
        phases=(Phase(step, count=steps),),
        finish=finish,
        params=lambda message, own: message["params"],
        adapt=(),
    )
