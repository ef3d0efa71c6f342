"""Partitioned variational inference with Gaussian factors, which clients keep; also of hierarchies.

    q(z) = t_0(z) prod_k t_k(z),    t_0 approximates the prior, t_k the likelihood of client k

    client:  q_k = argmax E_q[l_k(z)] - KL(q || q_old / t_k),    t_k <- t_k (q_k / q_old)^delta
    server:  q <- q prod_k (q_k / q_old)^delta

Local sites are integrated out by Laplace's method, so that l_k is the client's log marginal
likelihood. With known Gaussian variances t_k is then hierarchical PVI's message to phi, N(m_t; phi,
V_t + L), and the result is exact after one visit to each client. The argmax is found by
natural-gradient steps on quasi-random points; one step is exact where l_k is quadratic.

FedGVI is PVI with a loss L of each row in place of -log p (`robust_losses`), and a divergence D:

    client:  q_k = argmin E_q[ sum_n L(z; x_n, y_n) ] + D(q : q_old / t_k)
    renyi:   D = log E_q[ (q / p)^(a - 1) ] / (a (a - 1)),    0 < a <= 1; a -> 1 is KL(q || p)

For Gaussians q = N(m, S) and p = N(m_0, S_0), with M = (a S_0 + (1 - a) S)^-1 and u = M (m - m_0),
D = u' M^-1 u / 2 + log |M^-1| / (2 a (1 - a)) - log |S| / (2 a) and constants. A step takes
Newton's for m, and for S the minimum of a bound that touches the objective at the last S: log |M^-1|
lies below its tangent, and u' M^-1 u below the cost of any split of m - m_0, here the last one's:

    S P S - S / a = (1 - a) S_old u u' S_old,      P = M / a + E_q of the loss's Hessian

Sources: Bui et al. 2018, arXiv:1811.11206, Algorithm 1; Ashman et al. 2022, arXiv:2202.12275; their
code's HPVIServer. FedGVI: Mildner et al. 2025, ICML, openreview M7mVzCV6uU; its losses and its
divergence are those of Knoblauch, Jewson and Damoulas 2019, arXiv:1904.02063. Here the server's
divergence is always KL, so that it multiplies factors. Differences: second derivatives instead of
Adam; any hierarchy instead of one Gaussian layer with known variance; for a prior that is not
Gaussian in unconstrained values the server keeps a factor, renewed in each round.
"""

from typing import Literal

import torch
from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.core.importance_sampling import normal_points
from hierfl.core.trees import Tree, chosen, sub
from hierfl.data.batch import ClientBatch
from hierfl.laplace.glm_rows import seen_linear
from hierfl.laplace.marginal import Marginal, check_integrable
from hierfl.method import Client, Method, Phase, Server, Trait
from hierfl.methods.about import About
from hierfl.methods.parts.robust_losses import LOSSES, Loss, with_loss
from hierfl.methods.posteriors.natural_factors import (
    FactorClientState,
    NaturalFactor,
    Visit,
    check_visits,
    factor_guide,
    factor_in,
    factor_server,
    guess,
    near,
    newton_step,
    no_factor,
    nowhere,
    renyi_step,
    shaped,
    visited,
)
from hierfl.program.program import Program
from hierfl.program.sites import Model

NEWTON = 6  # steps to the mode of the local sites
AT_ONCE = 32  # points evaluated together


@About(
    infers=(
        "a Gaussian factor per client, refined by visits; FedGVI, which outliers cannot move far, "
        "with `loss=` and `divergence=`"
    ),
    source="Ashman et al. 2022, arXiv:2202.12275; FedGVI: Mildner et al. 2025",
    common="sites",
    own="sites with modes",
    guide="a Gaussian",
    kept="its Gaussian factor; mode of the local sites",
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
    loss: Loss = "likelihood",
    power: float = 0.5,
    divergence: Literal["kl", "renyi"] = "kl",
    alpha: float = 0.5,
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
        loss: of a row. "likelihood": minus its log likelihood. "beta", "gamma" and "cross_entropy"
            (of classes) are bounded, so that rows that fit no z are left aside: FedGVI, without
            local sites. A loss is in no unit: its posterior is wider or narrower than Bayes'.
        power: of the density in such a loss, in (0, 1]: beta - 1, gamma - 1, or the cross entropy's
            exponent; near 0 it is the likelihood. Default: our choice.
        divergence: of q from the cavity. "renyi" trusts the prior less than "kl"; its precision is
            found by iteration, 10 `steps` or more.
        alpha: order of "renyi", in (0, 1]; 1 is "kl". Default: our choice.
        max_global_size: largest K, the number of global unknowns.

    Raises:
        ValueError: `damping`, `power` or `alpha` is outside (0, 1], `draws` is odd or below 2,
            `steps` is below 1, or `loss` or `divergence` is none of these words; (during a fit) q
            is not a distribution, because damping was too large.
        ProgramError: (at fit) a local site cannot be integrated by Laplace's method; K is above
            `max_global_size`; or, with another `loss`, the model has local sites, or labels of
            another distribution than Normal, Bernoulli or Categorical.
    """
    check_visits(damping, draws, steps)
    expect(loss=(loss, LOSSES), divergence=(divergence, ("kl", "renyi")))
    expect(power=(power, "(0, 1]"), alpha=(alpha, "(0, 1]"))
    order = 1.0 if divergence == "kl" else alpha
    full = factors == "full"

    def points(program: Program) -> Tensor:
        """Return points of a standard Normal, (draws, K)."""
        check_integrable(program, max_global_size)
        return normal_points(draws, program.latents.global_block.size, seed=program.seed)

    def client(program: Program) -> Client:
        standard, delta = points(program), program.share if damping is None else damping
        changed = with_loss(program, loss, power)
        marginal = Marginal(changed, seen_linear(changed))

        def start(message: Tree, own: FactorClientState) -> Visit:
            q = factor_in(message)
            return Visit(q, sub(q, own.factor), own.near, torch.zeros(()))

        def move(work: Visit, message: Tree, batch: ClientBatch) -> Visit:
            """Take a natural-gradient step to q_k: precision <- cavity's - E[l''], mean by Newton."""
            q = work.q
            with torch.no_grad():
                covariance = torch.linalg.inv_ex(q.precision).inverse
                loc = covariance @ q.shift
                at = loc + standard @ torch.linalg.cholesky_ex(covariance).L.T
                expansion, inner = torch.vmap(
                    lambda z: marginal.expand(z, guess(work.near, z), batch, NEWTON),
                    chunk_size=AT_ONCE,
                )(at)
                tilt = (q, loc, expansion.gradient.mean(0), expansion.hessian.mean(0), work.cavity)
                if order == 1.0:
                    precision, mean, proper = newton_step(*tilt)
                else:
                    precision, mean, proper = renyi_step(*tilt, order, full)
                precision = shaped(precision, full)
                new = NaturalFactor(precision @ mean, precision)
            improper = 1.0 - proper.to(loc.dtype)
            return Visit(chosen(proper, new, q), work.cavity, near(inner, at), improper)

        return Client(
            own=FactorClientState(no_factor(marginal.shared.size), nowhere(marginal)),
            start=start,
            phases=(Phase(move, count=steps, turns=draws),),
            finish=lambda work, message, own, rows: visited(work, message, own, delta),
            params=lambda message, own: message["params"],
            adapt=(),
        )

    def server(program: Program) -> Server:
        return factor_server(Marginal(program), points(program), full=full)

    name = "pvi" if loss == "likelihood" and order == 1.0 else "fedgvi"
    traits: frozenset[Trait] = frozenset({"by rows", "factors"})
    traits = traits if full else traits | {"diagonal"}
    return Method(name, model, factor_guide(full=full), client, server, traits=traits)
