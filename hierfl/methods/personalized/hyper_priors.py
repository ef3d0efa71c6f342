"""Hyper-priors above the common prior of the clients' weights: FedHB and pFedHB.

FedHB: hierarchical Bayes with a normal-inverse-Wishart prior above the clients' weights.

For each weight, with mu and v its mean and variance over clients,

    model:   v ~ IW(psi, nu),  mu | v ~ N(0, v / l),    w_k ~ N(mu, v),    y_k ~ p(y | w_k)
    client:  q_k = N(m_k, s_k^2) <- steps down  E_q NLL_k + KL(q_k || N(m, V / n))
    server:  m <- sum_k m_k / (N + l),    n = N + nu
             V <- psi + sum_k [ s_k^2 + (m_k - m)^2 ] + l m^2

so that q(mu, v) is normal-inverse-Wishart, and E_q[1 / v] = n / V is the precision that clients see.

Source: Kim and Hospedales 2023, arXiv:2305.04979, the NIW case. Differences: one distribution for
each weight; with one for all of them, and a diagonal V, the pull toward m grows with their number.
Clients fit their own variances, where the paper takes a small constant. With a cohort, sums over
clients are N times its means. The mixture of networks is not here.

pFedHB: a conjugate hyper-prior on the mean and the spread of the clients' common prior.

For each weight, with mu and v the mean and the variance of the prior of w_k, and c_k = n_k / n,

    client:  q_k = N(m_k, s_k^2) <- steps down  [ E_q NLL_k + KL(q_k || N(mu, v)) ] / n_k
    server:  mu, v <- argmin  sum_k c_k KL(q_k || N(mu, v)) + a mu^2 + b v,  by turns
             mu = sum_k c_k m_k / (1 + 2 a v),    v = (sqrt(1 + 8 b W) - 1) / (4 b),
             W = sum_k c_k [ s_k^2 + (m_k - mu)^2 ]

a draws the common weights to 0, and b the clients' to them. FedABML's exact server, which is EM, has
a = b = 0.

Source: Thapa and Li 2025, ICML, PMLR 267:59285-59303. Differences: the server minimizes exactly,
where the authors take five steps of Adam; clients that the round does not sample do not train; and
all of a client's weights start from the prior in each round, where the authors' heads go on from
the last one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.guides.mean_field import mean_field
from hierfl.method import Method, Server
from hierfl.methods.about import About
from hierfl.methods.fedabml import client_of, mean_per_row
from hierfl.methods.parts.averaging import Descent
from hierfl.methods.parts.prior_params import moments_and_scales
from hierfl.methods.wrappers.averages import by_rows
from hierfl.optimizers import SGD, Adam, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Family, Guide, Model


@About(
    infers="each client's posterior, and the normal-inverse-Wishart posterior of their prior",
    source="Kim and Hospedales 2023, arXiv:2305.04979",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    down="the prior's means and scales",
    up="`moments`: mean of its posterior less the prior's, and the second moment about it; `loss`",
)
def fedhb(
    model: Model,
    guide: Guide | Family = mean_field,
    *,
    prior_clients: float = 1.0,
    prior_freedom: float = 3.0,
    prior_spread: float = 1.0,
    optimizer: Optimizer = SGD(0.01),  # noqa: B008 (frozen)
    steps: int = 5,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
    draws: int = 5,
) -> Method:
    """Return FedHB of a hierarchical program, with a normal-inverse-Wishart prior for each weight.

    New clients are inferred by `fit.personalize(rows, rounds=e)`, as by `fedabml`.

    Args:
        model: local sites whose Normal prior has global params for mean and scale, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale="learned")`.
        guide: `mean_field`, or `delta` for point estimates.
        prior_clients: l, how many clients the prior's mean of 0 counts as. prior_clients,
            prior_freedom and prior_spread: the paper's, for one weight (1, d + 2 and 1).
        prior_freedom: nu, degrees of freedom of the variance.
        prior_spread: psi, sum of squares that the prior adds. 0 for all three: the empirical Bayes
            of `fedabml(server="exact")`.
        optimizer: of q_k, started from scratch in each round. optimizer, steps, batch_size and
            draws: as `fedabml`'s.
        steps: passes over the rows of a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        draws: of q_k, that each gradient is averaged over.

    Raises:
        ValueError: `prior_clients`, `prior_freedom` or `prior_spread` is negative.
        ProgramError: (at fit) as for `fedabml(server="exact")`; or the prior's scale is not learned.
    """
    expect(
        prior_clients=(prior_clients, "[0, inf)"),
        prior_freedom=(prior_freedom, "[0, inf)"),
        prior_spread=(prior_spread, "[0, inf)"),
    )

    def posterior(count: int, mean: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
        new = mean * count / (count + prior_clients)
        total = prior_spread + count * (around + (mean - new).square())
        total = total + prior_clients * new.square()
        return new, (total / (count + prior_freedom)).clamp(min=0.0)

    descent = Descent(optimizer, steps, unit, batch_size)
    return _with_rule("fedhb", model, guide, descent, draws, posterior)


TURNS = 50  # of mu and v; the last changes nothing that a float shows
LEAST = 1e-12  # v, where points of clients agree


@About(
    infers="each client's posterior, and the mean and spread of their prior under a hyper-prior",
    source="Thapa and Li 2025, PMLR 267:59285-59303",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    down="the prior's means and scales",
    up="`moments`*: mean of its posterior less the prior's, and the second moment about it; `loss`*",
)
def pfedhb(
    model: Model,
    guide: Guide | Family = mean_field,
    *,
    mean_penalty: float = 5.0,
    variance_penalty: float = 5.0,
    optimizer: Optimizer = Adam(0.001),  # noqa: B008 (frozen)
    steps: int = 2,
    unit: Literal["step", "epoch"] = "epoch",
    batch_size: int | None = 50,
    draws: int = 5,
) -> Method:
    """Return pFedHB of a hierarchical program, with a hyper-prior of each weight's mean and variance.

    A round multiplies the mean by 1 / (1 + 2 a v): where clients differ much, as by v = 0.02, the
    authors' a = 5 takes a sixth of the common weights away. Take a smaller one there.

    New clients are inferred by `fit.personalize(rows, rounds=e)`, as by `fedabml`.

    Args:
        model: local sites whose Normal prior has global params for mean and scale, such as
            `hierfl.models.bayesian_network(module, prior_loc="learned", prior_scale="learned")`.
        guide: `mean_field`, or `delta` for point estimates.
        mean_penalty: a, 0 or more. All defaults: the authors' code.
        variance_penalty: b, 0 or more.
        optimizer: of q_k, started from scratch in each round.
        steps: passes over the rows of a round, or mini-batches (`unit`).
        unit: "epoch" or "step".
        batch_size: rows of a mini-batch; None: all.
        draws: of q_k, that each gradient is averaged over.

    Raises:
        ValueError: `mean_penalty` or `variance_penalty` is negative.
        ProgramError: (at fit) as for `fedabml(server="exact")`; or the prior's scale is not learned.
    """
    expect(mean_penalty=(mean_penalty, "[0, inf)"), variance_penalty=(variance_penalty, "[0, inf)"))

    def penalized(count: int, mean: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
        return most_likely(mean, around, mean_penalty, variance_penalty)

    descent = Descent(optimizer, steps, unit, batch_size)
    plain = _with_rule("pfedhb", model, guide, descent, draws, penalized)
    return replace(by_rows(plain), name="pfedhb")


def _with_rule(
    name: str,
    model: Model,
    guide: Guide | Family,
    descent: Descent,
    draws: int,
    rule: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Method:
    """Return FedABML's clients under a server whose rule is of the number of clients, mean, and spread about it."""

    def server(program: Program) -> Server:
        moments = moments_and_scales(program, name)
        return moments.server(program, partial(rule, program.num_clients))

    client = partial(client_of, descent=descent, loss=mean_per_row(1.0), draws=draws)
    return Method(name, model, guide, client, server)


def most_likely(mean: Tensor, around: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
    """Return mu and v, given sum c_k m_k and sum c_k [s_k^2 + (m_k - mean)^2], elementwise."""

    def variance_at(mu: Tensor) -> Tensor:
        whole = around + (mean - mu).square()
        # (sqrt(1 + 8 b W) - 1) / (4 b), which b = 0 does not divide by 0
        return (2.0 * whole / (1.0 + (1.0 + 8.0 * b * whole).sqrt())).clamp(min=LEAST)

    mu = mean
    for _ in range(TURNS if a else 0):
        mu = mean / (1.0 + 2.0 * a * variance_at(mu))
    return mu, variance_at(mu)
