"""FedEP: expectation propagation with one Gaussian factor per client, fitted by moments.

    q(z) = t_0(z) prod_k t_k(z),    t_0 approximates the prior, t_k the likelihood of client k; all but t_0 start at 1

    client:  q_k <- the Gaussian with mean and covariance of  exp(l_k(z)) q(z) / t_k(z),    t_k <- t_k (q_k / q)^delta
    server:  q <- q prod_k (q_k / q)^delta
    SEP:     clients keep nothing; t_k is one N-th of all factors, (q / t_0)^(1 / N)

It is PVI with another projection: moments, in place of the reverse KL. With diagonal factors the
two differ, even where all is Gaussian; with full ones both are then exact. The moments are weighted
means over quasi-random points of the Laplace approximation to the tilted posterior. Local sites are
integrated out by Laplace's method.

Source: Guo et al. 2023, arXiv:2302.04228, Algorithms 1 and 2. Differences: the authors' clients
have networks, fit moments by SGD, a scaled identity or a diagonal Fisher, and temper; clip changes
and precisions; and step the server with momentum, after which q is no product of factors. Here
models have few global unknowns, and damping is all. In the authors' SEP the cavity is q^(1 - 1 /
N), whose fixed point has lost the prior; here t_0 stays in it.

It is Bayesian throughout: the posterior under the program's own prior, by Gaussian factors.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hierfl.core.importance_sampling import normal_points
from hierfl.core.trees import Tree, chosen, scaled, sub
from hierfl.data.batch import ClientBatch
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Marginal, check_integrable
from hierfl.method import Client, Clock, Method, Phase, Server, Share, Up
from hierfl.methods.about import About
from hierfl.methods.posteriors.natural_factors import (
    FactorClientState,
    FactorServerState,
    NaturalFactor,
    NearMode,
    Visit,
    check_visits,
    factor_guide,
    factor_in,
    factor_server,
    guess,
    newton_step,
    no_factor,
    nowhere,
    visited,
)
from hierfl.program.program import Program
from hierfl.program.sites import Model

NEWTON = 6  # steps to the mode of the local sites
WIDER = 1.25  # see wide_points
MATCHES = 3  # passes of importance sampling
AT_ONCE = 32  # points evaluated together


class FedEPWork(NamedTuple):
    """A client's visit, the tilted posterior's Gaussian with correlations, and the effective points' share, ()."""

    visit: Visit
    at: NaturalFactor
    effective: Tensor


@About(
    infers=(
        "a Gaussian factor per client by moments, expectation propagation; one shared "
        "factor with `shared_factor=True`"
    ),
    source="Guo et al. 2023, arXiv:2302.04228",
    common="sites",
    guide="a Gaussian, by moments",
    kept="its Gaussian factor; mode of the local sites. Nothing with `shared_factor=True`",
    new="the global posterior",
    down="the global Gaussian; with `shared_factor=True` also the shared factor",
    up="the change of its factor: `shift`, (K,); `precision`, (K, K); `improper` and `effective`, one scalar each",
)
def fedep(
    model: Model,
    *,
    factors: Literal["full", "diagonal"] = "full",
    shared_factor: bool = False,
    damping: float | None = None,
    steps: int = 5,
    draws: int = 64,
    max_global_size: int = 300,
) -> Method:
    """Return FedEP of a program with few global sites; local sites are integrated out.

    The published algorithm shows the server each client's change. Here the server needs only their
    sums (`Method.discloses`).

    Args:
        model: as for `fedlaplace`.
        factors: covariance of the Gaussian factors, "full" or "diagonal". A diagonal one matches
            the variances.
        shared_factor: whether all clients share one factor and keep nothing (stochastic EP, SEP).
        damping: delta, in (0, 1]; None: 1 / N, as the authors' power of the change. 1 is exact in
            one round of all clients where all is Gaussian and factors are full.
        steps: Newton steps of a visit to the mode of the tilted posterior, 1 or more.
        draws: quasi-random draws of a visit, even. At least 4 K are taken.
        max_global_size: largest K, the number of global unknowns.

    Raises:
        ValueError: `damping` is outside (0, 1], `draws` is odd or below 2, or `steps` is below 1;
            (during a fit) q is not a distribution, because damping was too large.
        ProgramError: (at fit) as for `pvi`.
    """
    check_visits(damping, draws, steps)
    full = factors == "full"

    def client(program: Program) -> Client:
        check_integrable(program, max_global_size)
        standard = wide_points(draws, program.latents.global_block.size, program.seed)
        delta = program.share if damping is None else damping
        marginal = Marginal(program, seen_linear(program))
        none = FactorClientState(no_factor(marginal.shared.size), nowhere(marginal))

        def start(message: Tree, own: Tree) -> FedEPWork:
            q = factor_in(message)
            factor = factor_in(message["factor"]) if shared_factor else own.factor
            last = none.near if shared_factor else own.near
            visit = Visit(q, sub(q, factor), last, torch.zeros(()))
            return FedEPWork(visit, q, torch.ones(()))

        def climb(work: FedEPWork, message: Tree, batch: ClientBatch) -> FedEPWork:
            """Take a Newton step of `at` to the tilted posterior's Laplace approximation."""
            at, (q, cavity, near, _) = work.at, work.visit
            with torch.no_grad():
                loc = torch.linalg.inv_ex(at.precision).inverse @ at.shift
                expansion, inner = marginal.expand(loc, guess(near, loc), batch, NEWTON)
                precision, mean, proper = newton_step(
                    at, loc, expansion.gradient, expansion.hessian, cavity
                )
                new = NaturalFactor(precision @ mean, precision)
            near, improper = NearMode(inner.mode, inner.slope, loc), 1.0 - proper.to(loc.dtype)
            visit = Visit(q, cavity, near, improper)
            return FedEPWork(visit, chosen(proper, new, at), work.effective)

        def match(work: FedEPWork, message: Tree, batch: ClientBatch) -> FedEPWork:
            """Give q and `at` the tilted posterior's moments; with fewer than 2 K effective points, q is `at`."""
            at, (q, cavity, near, improper) = work.at, work.visit
            with torch.no_grad():
                covariance = torch.linalg.inv_ex(at.precision).inverse
                before = covariance @ at.shift
                points = before + standard.at @ torch.linalg.cholesky_ex(covariance).L.T
                values, _ = torch.vmap(
                    lambda z: marginal.value(z, guess(near, z), batch, NEWTON), chunk_size=AT_ONCE
                )(points)
                bent = (points @ cavity.precision * points).sum(-1)
                energy = points @ cavity.shift - 0.5 * bent
                log_weights = values + energy + 0.5 * standard.at.square().sum(-1)
                weights = (log_weights + standard.log_weights).softmax(0)
                effective = 1.0 / weights.square().sum()
                reliable = effective >= 2.0 * len(before)
                mean = weights @ points
                spread = (weights[:, None] * (points - mean)).T @ (points - mean)
                loc = torch.where(reliable, mean, before)
                spread = torch.where(reliable, spread, covariance)
                covariance_of_q = spread if full else spread.diagonal().diag()
            proper = improper == 0.0
            visit = work.visit._replace(q=chosen(proper, natural(loc, covariance_of_q), q))
            at = chosen(proper, natural(loc, spread), at)
            return FedEPWork(visit, at, effective / len(weights))

        def finish(work: FedEPWork, message: Tree, own: Tree, rows: Tensor) -> tuple[Up, Tree]:
            up, after = visited(work.visit, message, own, delta)
            return {**up, "effective": Share(work.effective)}, after

        return Client(
            own={} if shared_factor else none,
            start=start,
            phases=(Phase(climb, count=steps), Phase(match, count=MATCHES, turns=len(standard.at))),
            finish=finish,
            params=lambda message, own: message["params"],
            adapt=(),
        )

    def server(program: Program) -> Server:
        check_integrable(program, max_global_size)
        averaged = normal_points(draws, program.latents.global_block.size, seed=program.seed)
        if not shared_factor:
            return factor_server(Marginal(program), averaged, full=full)

        def down(state: FactorServerState, clock: Clock) -> Tree:
            factors = sub(state.q, state.prior)
            return {**state.q._asdict(), "factor": scaled(factors, program.share)._asdict()}

        return factor_server(Marginal(program), averaged, full=full, down=down)

    return Method(
        "fedep", model, factor_guide(full=full), client, server, traits=frozenset({"by rows"})
    )


class WidePoints(NamedTuple):
    """Points for a standard normal that reach further than its own draws, with exact moments."""

    at: Tensor  # (S, K), of weighted mean 0 and weighted covariance I
    log_weights: Tensor  # (S,)


def wide_points(count: int, size: int, seed: int) -> WidePoints:
    """Return 4 K or more points of a normal of variance 1 + WIDER / sqrt(K), weighted to the standard one."""
    points = normal_points(max(count, 4 * size), size, seed=seed)
    variance = 1.0 + WIDER / math.sqrt(size)
    log_weights = -0.5 * (variance - 1.0) * points.square().sum(-1)
    weights = log_weights.softmax(0)
    tril = torch.linalg.cholesky((weights[:, None] * points).T @ points)
    return WidePoints(torch.linalg.solve_triangular(tril, points.T, upper=False).T, weights.log())


def natural(loc: Tensor, covariance: Tensor) -> NaturalFactor:
    """Return a Gaussian's natural parameters, from its mean (K,) and covariance (K, K)."""
    precision = torch.linalg.inv_ex(covariance).inverse
    precision = 0.5 * (precision + precision.T)
    return NaturalFactor(precision @ loc, precision)
