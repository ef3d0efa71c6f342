"""Draws of a mixture whose components have no order are said to be of one order, and no others are."""

from collections.abc import Callable
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.diagnostics.checks import checks_of_fit
from hierfl.diagnostics.exchangeable import exchangeable
from hierfl.diagnostics.verdict import evidence_of
from hierfl.posterior.draws import Draws

Model = Callable[[ClientBatch], None]


def rows_of(batch: ClientBatch, share: Tensor, means: Tensor) -> None:
    with batch.clients():
        away = pyro.sample("away", dist.Normal(0.0, 1.0))
        with batch.data():
            each = dist.Normal(away.unsqueeze(-1) + means, 1.0)
            which = dist.Categorical(probs=share)
            pyro.sample("y", dist.MixtureSameFamily(which, each), obs=batch.y)


def of_a_vector(batch: ClientBatch) -> None:
    share = pyro.sample("share", dist.Dirichlet(torch.ones(2)))
    rows_of(batch, share, pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1)))


def of_a_share(batch: ClientBatch) -> None:
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    rows_of(batch, torch.stack([share, 1.0 - share], -1), mu)


def with_an_order(batch: ClientBatch) -> None:
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-1.0, 1.0]), 5.0).to_event(1))
    rows_of(batch, torch.stack([share, 1.0 - share], -1), mu)


def with_a_sum(batch: ClientBatch) -> None:
    """Two effects of which rows read the sum: they can be exchanged, and there is one mode."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    with batch.clients():
        away = pyro.sample("away", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(away + mu.sum(-1), 1.0), obs=batch.y)


@cache
def fitted(model: Model) -> hierfl.Fit:
    g = torch.Generator().manual_seed(0)
    data = ClientData.from_clients({f"c{k}": {"y": torch.randn(6, generator=g)} for k in range(3)})
    return hierfl.fit(hierfl.methods.fedsvi(model), data, rounds=1, progress=False)


def draws(model: Model, *, apart: float) -> Draws:
    """Return 200 draws whose components have means that far apart."""
    g = torch.Generator().manual_seed(1)
    share = 0.3 + 0.05 * torch.randn(200, generator=g)  # in the programs that have it
    if model is of_a_vector:
        share = torch.stack([share, 1.0 - share], -1)
    mu = torch.randn(200, 2, generator=g) + torch.tensor([0.0, apart])
    return Draws({"share": share, "mu": mu}, {"away": torch.randn(200, 3, generator=g)})


@pytest.mark.parametrize("model", [of_a_vector, of_a_share])
def test_components_without_an_order_are_named(model: Model) -> None:
    found = exchangeable(fitted(model), draws(model, apart=4.0))
    assert set(found) == {"mu", "share"}


@pytest.mark.parametrize("model", [with_an_order, with_a_sum])
def test_others_are_not(model: Model) -> None:
    assert exchangeable(fitted(model), draws(model, apart=0.0)) == ()
    if model is with_an_order:
        assert exchangeable(fitted(model), draws(model, apart=4.0)) == ()


def test_the_verdict_says_so() -> None:
    fit, drawn = fitted(of_a_vector), draws(of_a_vector, apart=4.0)
    found = evidence_of(fit, drawn, (), None, spread=True, bad=(), seed=0)
    (check,) = [c for c in checks_of_fit(found) if "order" in c.question]
    assert check.verdict == "warning" and "share" in check.answer and "mu" in check.answer
