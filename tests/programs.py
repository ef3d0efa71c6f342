"""Shared by the tests of the core: small federations, models, and closed-form posteriors of some of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to

import hierfl
from hierfl import ClientBatch, ClientData, Phase, Program, ProgramError, guides
from hierfl.core.trees import named_leaves
from hierfl.engine.minibatches import _Plan
from hierfl.program import public_names
from hierfl.program.program import Params
from hierfl.program.sites import Family, Model

NAMES = ("north", "south", "east", "west", "mid")  # not in alphabetical order
FLAT = {field.name for field in fields(hierfl.Settings)}
read = hierfl.read


def names_in_recipes() -> list[tuple[str, str]]:
    """Return module and name of all that a recipe may hold."""
    found = []
    for module, names in public_names.NAMES.items():
        also = import_module(module).__all__ if module in public_names.EXPORTING else ()
        of_module = dict.fromkeys((*names, *also))
        found += [(module, n) for n in of_module if public_names.exported(module, n) is not None]
    return found


def row_plan(
    data: ClientData, ids: Tensor, phase: Phase, *, seed: int, at: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of every step: positions and padding, (K, C, B), and who works, (K, C)."""
    plan = _Plan.of(data, ids, phase, seed=seed, at=at)
    return next(plan.blocks(max(1, plan.steps)))


def settings(**options: Any) -> hierfl.Settings:
    """Settings of an eager run: compiling does not pay for a few rounds, and has tests of its own."""
    return hierfl.Settings(**{"compile": False, **options})


def fit(method: Any, data: Any, **options: Any) -> hierfl.Fit:
    """`hierfl.fit`, eager, with the fields of Settings as arguments; engine="pooled" is `hierfl.fit_pooled`."""
    if options.get("engine") == "pooled":
        return hierfl.fit_pooled(method, data, **{k: options[k] for k in options if k != "engine"})
    flat = {name: options.pop(name) for name in FLAT & options.keys()}
    return hierfl.fit(method, data, settings=settings(**flat), **options)


def same(one: hierfl.Fit, other: hierfl.Fit) -> None:
    """Check that two runs ended in the same: states bit for bit, and the history but its seconds."""
    here, there = (named_leaves((f.progress.server, f.progress.table)) for f in (one, other))
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert value.dtype == there[name].dtype, name
        assert torch.equal(value.nan_to_num(), there[name].nan_to_num()), name
    assert (one.progress.round, one.clients) == (other.progress.round, other.clients)
    histories = [f.history.drop(columns="seconds") for f in (one, other)]
    assert histories[0].equals(histories[1])


def assert_close(one: Any, other: Any, atol: float = 1e-9) -> None:
    """Check that two trees of tensors have the same leaves, and the same numbers; NaN equals NaN."""
    leaves = named_leaves(one), named_leaves(other)
    torch.testing.assert_close(*leaves, rtol=0.0, atol=atol, equal_nan=True)


FAMILIES: dict[str, Family] = {
    "delta": guides.delta,
    "mean_field": guides.mean_field,
    "low_rank": guides.low_rank(rank=2),
    "structured": guides.structured,
    "structured_flow": guides.structured(shared=guides.spline_flow, full=False),
    "conditional": guides.conditional,
    "amortized": guides.amortized(hidden=4),
}


def federation(counts: Sequence[int] = (5, 3, 7, 1), *, seed: int = 0) -> ClientData:
    """Clients with different numbers of rows.

    Fields: features x (2,), labels y, ill (0/1) and visits (counts). Client field: `height`.
    """
    g = torch.Generator().manual_seed(seed)
    n = sum(counts)
    x = torch.randn(n, 2, generator=g)
    return ClientData.from_arrays(
        torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        names=NAMES[: len(counts)],
        client_fields={"height": torch.randn(len(counts), generator=g)},
        x=x,
        y=x.sum(-1) + torch.randn(n, generator=g),
        ill=(torch.rand(n, generator=g) < 0.5).to(x.dtype),
        visits=torch.poisson(torch.ones(n), generator=g),
    )


@hierfl.model
def regression(batch: ClientBatch) -> None:
    """Varying slopes with an unknown spread, whose mean is shifted by a client field.

    No part of it is conjugate.
    """
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    lift = pyro.sample("lift", dist.Normal(0.0, 1.0))
    with batch.clients():
        slope = pyro.sample(
            "slope", dist.Normal(loc + lift * batch.height[..., None], spread).to_event(1)
        )
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * slope).sum(-1), 1.0), obs=batch.y)


@hierfl.model
def logistic(batch: ClientBatch) -> None:
    """Varying slopes with a known spread, and 0/1 labels."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        slope = pyro.sample("slope", dist.Normal(loc, 0.7).to_event(1))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=(batch.x * slope).sum(-1)), obs=batch.ill)


def leveled(
    rows: Callable[[ClientBatch, Tensor], object],
    prior: Callable[[ClientBatch], Any] = lambda batch: dist.Normal(0.0, 1.0),
) -> Model:
    """Return a model with one local site w of that prior; `rows` samples what is in the data plate, given w."""

    def model(batch: ClientBatch) -> None:
        with batch.clients():
            w = pyro.sample("w", prior(batch))
            with batch.data():
                rows(batch, w)

    return model


def normal_rows(batch: ClientBatch, loc: Tensor) -> None:
    """Observe y about a location."""
    pyro.sample("y", dist.Normal(loc, 1.0), obs=batch.y)


# ---------------------------------------------------------------------------------------------- closed forms
def three() -> ClientData:
    """Example E2 of methods_bayesian.md."""
    return ClientData.from_clients(
        {"a": {"y": [1.0, 2.0]}, "b": {"y": [0.0]}, "c": {"y": [3.0, 4.0, 5.0]}}
    )


class Doubled(dist.Bernoulli):  # type: ignore[misc]
    """A derived likelihood with another density than its parent."""

    def log_prob(self, value: Tensor) -> Tensor:
        density: Tensor = 2.0 * super().log_prob(value)
        return density


def doubled(batch: ClientBatch) -> None:
    """`logistic` about 0, with such a likelihood."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with batch.data():
            pyro.sample("y", Doubled(logits=(batch.x * w).sum(-1)), obs=batch.ill)


def of_rows(shared: Callable[[], tuple[Any, ...]]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator: a site a of each client about the first of `shared` sites; it writes the data plate."""

    def decorated(inside: Callable[..., None]) -> Callable[[ClientBatch], None]:
        def model(batch: ClientBatch) -> None:
            mu, *others = shared()
            with batch.clients():
                own = pyro.sample("a", dist.Normal(mu, 1.0))
                with batch.data():
                    inside(batch, own, *others)

        return model

    return decorated


def means(batch: ClientBatch) -> None:
    """E2: g ~ Normal(0, 2^2), b_k ~ Normal(g, 1), y ~ Normal(b_k, 1)."""
    g = pyro.sample("g", dist.Normal(0.0, 2.0))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(g, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


def alone(batch: ClientBatch) -> None:
    """Clients that share nothing."""
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


def learned(batch: ClientBatch) -> None:
    """Clients about a mean that is learned without a prior."""
    m = pyro.param("m", torch.tensor(0.0))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(m, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


PRIOR_TRIL = torch.tensor([[1.5, 0.0], [-0.4, 0.8]], dtype=torch.float64)
SPREAD_TRIL = torch.tensor([[0.9, 0.0], [0.5, 0.6]], dtype=torch.float64)
PRIOR_LOC = torch.tensor([0.5, -1.0], dtype=torch.float64)
NOISE = 0.8


def slopes(batch: ClientBatch) -> None:
    """g ~ MVN, b_k ~ MVN(g, L), y ~ Normal(x b_k, v): all variances are known, and all numbers correlated."""
    g = pyro.sample("g", dist.MultivariateNormal(PRIOR_LOC, scale_tril=PRIOR_TRIL))
    with batch.clients():
        b = pyro.sample("b", dist.MultivariateNormal(g, scale_tril=SPREAD_TRIL))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * b).sum(-1), NOISE), obs=batch.y)


@dataclass(frozen=True)
class Exact:
    """The posterior of a linear-Gaussian hierarchy, with K unknowns at each level.

    Args:
        loc: mean of g, (K,).
        cov: covariance of g, (K, K).
        own_loc: mean of each b_k, (N, K).
        own_cov: covariance of each b_k, (N, K, K).
        given_slope: slope of the mean of b_k given g, (N, K, K).
        given_cov: covariance of b_k given g, (N, K, K).
        log_evidence: log density of all rows.
    """

    loc: Tensor
    cov: Tensor
    own_loc: Tensor
    own_cov: Tensor
    given_slope: Tensor
    given_cov: Tensor
    log_evidence: float


def exact(data: ClientData, name: str) -> Exact:
    """Return the posterior of `means` or `slopes`: oracle O1 of methods_in_depth.md."""
    if name == "means":
        m0, s0, spread, v = torch.zeros(1), 4.0 * torch.eye(1), torch.eye(1), 1.0
        designs = [torch.ones(int(c), 1) for c in data.counts]
    else:
        m0, s0, spread, v = (
            PRIOR_LOC,
            PRIOR_TRIL @ PRIOR_TRIL.T,
            SPREAD_TRIL @ SPREAD_TRIL.T,
            NOISE**2,
        )
        designs = list(data.fields["x"].split(data.counts.tolist()))
    ys = data.fields["y"].split(data.counts.tolist())
    precision, shift = s0.inverse(), s0.inverse() @ m0
    for x, y in zip(designs, ys, strict=True):
        c = v * torch.eye(len(y)) + x @ spread @ x.T
        precision, shift = precision + x.T @ c.inverse() @ x, shift + x.T @ c.inverse() @ y
    loc, cov = precision.inverse() @ shift, precision.inverse()
    given_cov = torch.stack([(x.T @ x / v + spread.inverse()).inverse() for x in designs])
    slope = given_cov @ spread.inverse()
    base = torch.stack([g @ x.T @ y / v for g, x, y in zip(given_cov, designs, ys, strict=True)])
    all_x, y = torch.cat(designs), torch.cat(ys)
    within = torch.block_diag(*(x @ spread @ x.T for x in designs))
    marginal = dist.MultivariateNormal(
        all_x @ m0, v * torch.eye(len(y)) + within + all_x @ s0 @ all_x.T
    )
    return Exact(
        loc,
        cov,
        base + slope @ loc,
        given_cov + slope @ cov @ slope.mT,
        slope,
        given_cov,
        marginal.log_prob(y).item(),
    )


# ------------------------------------------------------------------------------------------------ handlers
class Given(Messenger):
    """Params and draws that are given, for running a model under Pyro's own machinery.

    It is written independently of hierfl's handlers.
    """

    def __init__(self, params: Params, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.params, self.values = params, values

    def _pyro_param(self, msg: dict[str, Any]) -> None:
        constraint = msg["kwargs"].get("constraint", dist.constraints.real)
        msg["value"], msg["done"] = transform_to(constraint)(self.params[msg["name"]]), True

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True


def at_random(program: Program, *, seed: int = 0, by: float = 0.3) -> Params:
    """Return all params at random points near their start: those of one client for local ones."""
    g = torch.Generator().manual_seed(seed)
    shared, own = program.start()
    return {
        name: value + by * torch.randn(value.shape, generator=g)
        for name, value in {**shared, **own}.items()
    }


__all__ = [
    "FAMILIES",
    "NAMES",
    "Exact",
    "Given",
    "ProgramError",
    "alone",
    "assert_close",
    "at_random",
    "exact",
    "federation",
    "fit",
    "learned",
    "leveled",
    "logistic",
    "means",
    "normal_rows",
    "read",
    "regression",
    "slopes",
    "three",
]
