"""FedHB: hierarchical Bayes with a normal-inverse-Wishart prior above the clients' weights.

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
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from hierfl.core.arguments import expect
from hierfl.guides.mean_field import mean_field
from hierfl.method import Method, Server
from hierfl.methods.about import About
from hierfl.methods.fedabml import FedABMLSetting, client_of
from hierfl.methods.parts.averaging import Descent
from hierfl.methods.parts.prior_params import moments_and_scales
from hierfl.optimizers import SGD, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Family, Guide, Model


@About(
    infers="each client's posterior, and the normal-inverse-Wishart posterior of their prior",
    source="Kim and Hospedales 2023, arXiv:2305.04979",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    crosses="mean and spread of its posterior",
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
    descent = Descent(optimizer, steps, unit, batch_size)
    how = FedABMLSetting(1.0, descent, optimizer, 1, draws, "envelope", exact=True)
    server = partial(_server, prior_clients, prior_freedom, prior_spread)
    return Method("fedhb", model, guide, partial(client_of, how), server)


def _server(weight: float, freedom: float, spread: float, program: Program) -> Server:
    """Return the server that moves to the posterior of mu and v."""
    count = program.num_clients

    def posterior(mean: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
        new = mean * count / (count + weight)
        total = spread + count * (around + (mean - new).square()) + weight * new.square()
        return new, (total / (count + freedom)).clamp(min=0.0)

    return moments_and_scales(program, "fedhb").server(program, posterior)
