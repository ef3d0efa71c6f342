"""pFedHB: a conjugate hyper-prior on the mean and the spread of the clients' common prior.

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

from __future__ import annotations

from dataclasses import replace
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
from hierfl.methods.wrappers.averages import by_rows
from hierfl.optimizers import Adam, Optimizer
from hierfl.program.program import Program
from hierfl.program.sites import Family, Guide, Model

TURNS = 50  # of mu and v; the last changes nothing that a float shows
LEAST = 1e-12  # v, where points of clients agree


@About(
    infers="each client's posterior, and the mean and spread of their prior under a hyper-prior",
    source="Thapa and Li 2025, PMLR 267:59285-59303",
    common="a prior's params",
    own="sites",
    guide="mean field",
    kept="its mean-field posterior",
    crosses="mean and spread of its posterior",
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
    descent = Descent(optimizer, steps, unit, batch_size)
    how = FedABMLSetting(1.0, descent, optimizer, 1, draws, "envelope", exact=True)
    server = partial(_server, mean_penalty, variance_penalty)
    plain = Method("pfedhb", model, guide, partial(client_of, how), server)
    return replace(by_rows(plain), name="pfedhb")


def _server(a: float, b: float, program: Program) -> Server:
    """Return the server that moves to the most likely mu and v."""
    rule = partial(most_likely, a=a, b=b)
    return moments_and_scales(program, "pfedhb").server(program, rule)


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
