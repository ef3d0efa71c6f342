"""Problems with a reference posterior: their data, programs, ways to fit them, and allowed errors.

Each `Way` is a program, a guide and settings that were found to meet its bars. A program may be
written centered (a local site is the effect itself) or non-centered (it is the effect in units of
its prior). The posterior is the same either way; the error of a guide is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData, guides
from hierfl.datasets import ReferenceSummary, reference
from hierfl.program.sites import Family, Model, Values

Draws = Mapping[str, Tensor]  # site -> (S, *shape), local ones (S, N, *shape)


@dataclass(frozen=True)
class Bar:
    """Range that the errors of a way to fit must lie in.

    Args:
        what: "mean": errors of posterior means, in posterior standard deviations; "sd": ratios of
            standard deviations.
        low: lower end of the range.
        high: upper end of the range.
        median: whether only the median over entries must lie in the range, rather than every entry.
        sites: sites whose entries are tested; None: all sites.
    """

    what: Literal["mean", "sd"]
    low: float
    high: float
    median: bool = False
    sites: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Way:
    """One way to fit a problem by `hierfl.methods.fedsvi`.

    Args:
        model: the program.
        guide: the guide.
        rounds: rounds of federated SVI.
        lr: Adam's step size, on the server and on each client; it falls to 0 on a half cosine.
        num_particles: draws of the guide over which a gradient is averaged.
        average: share of the rounds, counted from the last, whose params are averaged.
        cohort: clients of a round, as in `hierfl.fit`.
        draws: posterior draws that are compared with the reference.
        bars: ranges that the errors must lie in.
    """

    model: Model
    guide: Family
    rounds: int
    lr: float
    num_particles: int
    average: float = 0.5
    cohort: float | None = None
    draws: int = 10_000
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Data, a model written in one or two ways, and where its posterior by long runs of MCMC is found.

    Args:
        name: name of the problem.
        source: name of the reference in `hierfl.datasets.reference`; None: there is none, and
            pooled NUTS is run instead.
        data: returns the clients' rows.
        effects: maps draws of the program's sites to draws of every site of the reference.
        sampled: the program for pooled NUTS.
        ways: name -> a way to fit the problem.
        dense: sites whose correlations pooled NUTS learns, by a dense mass matrix.
    """

    name: str
    source: str | None
    data: Callable[[], ClientData]
    effects: Callable[[Draws], Draws]
    sampled: Model
    ways: Mapping[str, Way] = field(default_factory=dict)
    dense: tuple[str, ...] = ()

    def shipped(self) -> dict[str, ReferenceSummary] | None:
        """Return the reference posterior; None if there is none or its file is missing."""
        if self.source is None:
            return None
        try:
            return reference(self.source)
        except FileNotFoundError:
            return None


# ------------------------------------------------------------------------------------------------
# radon
def _radon_globals(scale: TorchDistributionMixin) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", scale)
    slope = pyro.sample("slope", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    return mu, tau, slope, pyro.sample("sigma", scale)


def radon_centered(batch: ClientBatch) -> None:
    """Model 919 homes in 85 counties: y ~ Normal(a_j + x . slope, sigma), a_j ~ Normal(mu, tau)."""
    _radon_centered(batch, dist.HalfNormal(1.0))


def _radon_centered(batch: ClientBatch, scale: TorchDistributionMixin) -> None:
    mu, tau, slope, sigma = _radon_globals(scale)
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a + batch.x @ slope, sigma), obs=batch.y)


def radon_non_centered(batch: ClientBatch) -> None:
    """Model the same, non-centered: a_j = mu + tau e_j, e_j ~ Normal(0, 1)."""
    mu, tau, slope, sigma = _radon_globals(dist.HalfNormal(1.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(mu + tau * e + batch.x @ slope, sigma), obs=batch.y)


def radon_effects(draws: Draws) -> Draws:
    """Return draws with the counties' effects a, for a centered or a non-centered program."""
    return (
        draws
        if "a" in draws
        else {**draws, "a": draws["mu"][:, None] + draws["tau"][:, None] * draws["e"]}
    )


# Given the global sites, rows and effects are jointly Gaussian, so that one Newton step reaches the
# mode.
EXACT = guides.conditional(newton_steps=0)
RADON = Problem(
    name="radon",
    source="radon",
    data=hierfl.datasets.radon,
    effects=radon_effects,
    sampled=radon_non_centered,
    ways={
        "conditional": Way(
            radon_centered, EXACT, 1000, 0.1, 8, bars=(Bar("mean", 0.0, 0.08), Bar("sd", 0.9, 1.1))
        ),
        "conditional_third": Way(
            radon_centered,
            EXACT,
            6000,
            0.02,
            4,
            average=0.7,
            cohort=1 / 3,
            bars=(Bar("mean", 0.0, 0.12),),
        ),
        "structured_non_centered": Way(
            radon_non_centered, guides.structured, 1000, 0.05, 8, bars=(Bar("mean", 0.0, 0.2),)
        ),
        "structured_centered": Way(radon_centered, guides.structured, 1000, 0.05, 8),
        "mean_field_non_centered": Way(radon_non_centered, guides.mean_field, 1000, 0.05, 8),
        "mean_field_centered": Way(radon_centered, guides.mean_field, 1000, 0.05, 8),
    },
)


def radon_uniform(batch: ClientBatch) -> None:
    """Model the same as `radon_centered`, with Uniform(0, 100) priors on both scales."""
    _radon_centered(batch, dist.Uniform(0.0, 100.0))


RADON_UNIFORM = Problem(
    name="radon_uniform",
    source="radon_uniform",
    data=hierfl.datasets.radon,
    effects=radon_effects,
    sampled=radon_uniform,
    ways={
        "conditional": Way(
            radon_uniform, EXACT, 1000, 0.1, 8, bars=(Bar("mean", 0.0, 0.08), Bar("sd", 0.9, 1.1))
        )
    },
)

# ------------------------------------------------------------------------------------------------
# hospitals
COLUMNS = [0, 1, 2, 3, 4, 7, 8, 9]  # the columns that at least three of the hospitals recorded


def hospital_data() -> ClientData:
    """Return heart_disease with an intercept and 8 columns.

    Columns are standardized over all patients; missing values are 0.
    """
    raw = hierfl.datasets.heart_disease("raw")
    (scaled,) = hierfl.standardize(raw)
    x = scaled.fields["x"][:, COLUMNS].nan_to_num(0.0)
    names = ["intercept", *(raw.features["x"][j] for j in COLUMNS)]
    rows = torch.cat([torch.ones(len(x), 1), x], 1)
    return ClientData.from_arrays(
        raw.row_client, names=raw.names, features={"x": names}, x=rows, y=raw.fields["y"]
    )


def hospitals(batch: ClientBatch) -> None:
    """Model 920 patients of 4 hospitals.

    Logistic regression, nine weights w_k ~ Normal(mu, exp(log_tau)).
    """
    mu = pyro.sample("mu", dist.Normal(torch.zeros(9), 1.0).to_event(1))
    log_tau = pyro.sample("log_tau", dist.Normal(-torch.ones(9), 0.7).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.Normal(mu, log_tau.exp()).to_event(1))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


LOCAL = ("w",)
HOSPITALS = Problem(
    name="hospitals",
    source="hospitals",
    data=hospital_data,
    effects=lambda draws: draws,
    sampled=hospitals,
    ways={
        "conditional": Way(
            hospitals,
            guides.conditional(newton_steps=3),
            400,
            0.05,
            2,
            draws=2000,
            bars=(
                Bar("mean", 0.0, 0.1, median=True, sites=LOCAL),
                Bar("mean", 0.0, 0.5, sites=LOCAL),
                Bar("sd", 0.95, 1.05, median=True, sites=LOCAL),
            ),
        ),
        "structured": Way(hospitals, guides.structured, 1000, 0.05, 4),
        "mean_field": Way(hospitals, guides.mean_field, 1000, 0.05, 4),
    },
)


# ---------------------------------------------------------------------------------- eight schools
def schools(batch: ClientBatch) -> None:
    """Model eight schools: y_j ~ Normal(mu + tau e_j, sigma_j) with known sigma_j.

    Priors are mu ~ Normal(0, 5), tau ~ HalfCauchy(5) and e_j ~ Normal(0, 1).
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with batch.clients():
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(mu + tau * e, batch.sigma), obs=batch.y)


def school_effects(draws: Draws) -> Draws:
    """Return draws with the schools' effects theta_j = mu + tau e_j."""
    return {**draws, "theta": draws["mu"][:, None] + draws["tau"][:, None] * draws["e"]}


MEANS = Bar("mean", 0.0, 0.15)
SCHOOLS = Problem(
    name="eight_schools",
    source="eight_schools_half_cauchy",
    data=hierfl.datasets.eight_schools,
    effects=school_effects,
    sampled=schools,
    ways={
        "conditional": Way(
            schools, EXACT, 500, 0.05, 8, bars=(MEANS, Bar("sd", 0.7, 1.3, sites=("mu", "theta")))
        ),
        "conditional_flow": Way(
            schools,
            guides.conditional(newton_steps=0, shared=guides.spline_flow),
            500,
            0.02,
            8,
            bars=(MEANS, Bar("sd", 0.8, 1.2)),
        ),
        "structured": Way(schools, guides.structured, 1000, 0.05, 8),
        "mean_field": Way(schools, guides.mean_field, 1000, 0.05, 8),
    },
)

PROBLEMS = {problem.name: problem for problem in (RADON, RADON_UNIFORM, HOSPITALS, SCHOOLS)}


def all_sites(shared: Values, own: Values) -> Draws:
    """Return draws of global and local sites in one mapping."""
    return {**shared, **own}
