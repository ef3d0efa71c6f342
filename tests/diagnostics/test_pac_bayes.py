"""The PAC-Bayes bound over planted data sets, with each term left out in turn."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import transform_to

import hierfl
from hierfl import ClientBatch, ClientData, Fit, guides
from hierfl.diagnostics.pac_bayes import PacBayes, pac_bayes
from hierfl.guides.global_sites import positive
from hierfl.methods import fedlaplace, fedsvi
from tests.programs import federation, fit, logistic, means, three

DELTA, SETS, ROWS, SIZE = 0.1, 300, 40, 20
CENTER = torch.nn.functional.one_hot(torch.tensor(0), SIZE).double() * 5.0
SPREAD = 0.3
RISK = 0.5  # labels are tosses of a coin, so every rule is wrong half the time


def coins(batch: ClientBatch) -> None:
    """w ~ Normal(CENTER, SPREAD^2), y ~ Bernoulli(logits x w)."""
    w = pyro.sample("w", dist.Normal(CENTER.to(batch.x.dtype), SPREAD).to_event(1))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Bernoulli(logits=(batch.x * w).sum(-1)), obs=batch.y)


def tosses(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return SETS data sets: x (SETS, ROWS, SIZE), and labels y that do not depend on it."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SETS, ROWS, SIZE, generator=g, dtype=torch.float64)
    return x, (torch.rand(SETS, ROWS, generator=g) < 0.5).double()


def fitted_to(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return a posterior close to the coins: the mean of w, (..., SIZE), and its scale."""
    square = x.mT @ x + 0.5 * torch.eye(SIZE, dtype=x.dtype)
    loc = torch.linalg.solve(square, x.mT @ (2.0 * y - 1.0)[..., None])[..., 0]
    return 10.0 * loc, 0.1


def terms_of(x: Tensor, y: Tensor, loc: Tensor, scale: float) -> list[PacBayes]:
    """Return the terms of the bound in closed form: x w is Gaussian, and so is w."""
    sign = 2.0 * y - 1.0
    margin = sign * (x * loc[..., None, :]).sum(-1) / (scale * x.square().sum(-1).sqrt())
    risk = torch.special.ndtr(-margin).mean(-1)
    ratio, away = scale / SPREAD, (loc - CENTER) / SPREAD
    kl = 0.5 * (ratio**2 + away.square() - 1.0 - 2.0 * math.log(ratio)).sum(-1)
    return [
        PacBayes(float(r), float(k), ROWS) for r, k in zip(risk, kl.expand(risk.shape), strict=True)
    ]


def violations(found: list[PacBayes], bound: Callable[[PacBayes], float]) -> float:
    """Return the share of data sets whose true risk is above the bound."""
    return sum(bound(one) < RISK for one in found) / len(found)


# --------------------------------------------------------- with every term, and without one of them
LOG = math.log(1.0 / DELTA)
MIDDLE = math.sqrt(8.0 * ROWS * LOG)  # the best eta for a posterior that is the prior
WITHOUT: dict[str, tuple[bool, float, Callable[[PacBayes, float], float]]] = {
    # term -> is q fitted to the rows, eta, and the part of the bound that is left out
    "KL": (True, MIDDLE, lambda one, eta: one.kl / eta),
    "log(1 / delta)": (False, MIDDLE / 3.0, lambda one, eta: LOG / eta),
    "slack": (False, 10.0 * ROWS, lambda one, eta: eta / (8.0 * ROWS)),
}


@pytest.mark.parametrize("term", WITHOUT)
def test_the_bound_holds_and_none_of_its_terms_may_be_left_out(term: str) -> None:
    """It is violated with frequency delta at most; without the term, far more often."""
    follows, eta, part = WITHOUT[term]
    x, y = tosses()
    found = terms_of(x, y, *(fitted_to(x, y) if follows else (CENTER, SPREAD)))
    assert violations(found, lambda one: one.bound(eta=eta, delta=DELTA)) <= DELTA
    without = violations(found, lambda one: one.bound(eta=eta, delta=DELTA) - part(one, eta))
    assert without > DELTA + 4.0 * math.sqrt(DELTA * (1.0 - DELTA) / SETS)


def test_the_best_eta_of_several_costs_a_share_of_delta() -> None:
    x, y = tosses()
    for loc, scale in (fitted_to(x, y), (CENTER, SPREAD)):
        assert violations(terms_of(x, y, loc, scale), lambda one: one.bound(delta=DELTA)) <= DELTA
    one = PacBayes(0.1, 12.0, 400)
    best = min(one.bound(eta=eta) for eta in torch.logspace(0.5, 4, 200).tolist())
    assert best < one.bound() < best + 0.05  # log of their number, and half a step off the best
    assert one.bound() < 0.5 and PacBayes(0.1, 12.0, 40_000).bound() < 0.13


def test_a_prior_that_was_trained_on_the_same_rows_gives_no_bound() -> None:
    """If q is its own prior, the KL is 0 and the bound is mostly wrong."""
    x, y = tosses()
    own = [replace(one, kl=0.0) for one in terms_of(x, y, *fitted_to(x, y))]
    assert violations(own, lambda one: one.bound(eta=MIDDLE, delta=DELTA)) > 0.5
    half = (
        ROWS // 2
    )  # the first half trains the prior, which is the posterior as well; the second judges it
    loc, scale = fitted_to(x[:, :half], y[:, :half])
    kept = [
        replace(one, kl=0.0, rows=half) for one in terms_of(x[:, half:], y[:, half:], loc, scale)
    ]
    assert violations(kept, lambda one: one.bound(eta=MIDDLE, delta=DELTA)) <= DELTA


def test_the_bound_is_the_sum_of_its_terms() -> None:
    one = PacBayes(0.2, 5.0, 50, width=2.0, se_risk=0.01, se_kl=0.1)
    assert one.bound(eta=30.0, delta=0.05) == pytest.approx(
        0.2 + 0.03 + (5.0 + 0.3 + math.log(20.0)) / 30.0 + 30.0 * 4.0 / 400.0
    )


# ------------------------------------------------------------------------------- the terms of a fit
@cache
def untrained() -> Fit:
    x, y = tosses()
    data = ClientData.from_arrays(torch.arange(ROWS) % 3, x=x[0], y=y[0])
    return fit(fedsvi(coins, guides.mean_field), data, rounds=1)


def placed(number: int, loc: Tensor, scale: float) -> Fit:
    """Return a fit of one data set, split over three clients, with a planted posterior."""
    (x, y), base = tosses(), untrained()
    data = ClientData.from_arrays(torch.arange(ROWS) % 3, x=x[number], y=y[number])
    server: Any = base.progress.server
    size = transform_to(positive).inv(torch.full((SIZE,), scale, dtype=torch.float64))
    planted = {"w.loc": loc, "w.scale": size}
    assert planted.keys() == server.mean.keys()
    return replace(
        base,
        federation=replace(base.federation, data=data),
        progress=replace(base.progress, server=server._replace(mean=planted)),
    )


def test_terms_of_a_fit_are_those_in_closed_form() -> None:
    x, y = tosses()
    loc, scale = fitted_to(x, y)
    for number in range(3):
        found = pac_bayes(placed(number, loc[number], scale), draws=400)
        wanted = terms_of(x[number][None], y[number][None], loc[number][None], scale)[0]
        assert found.rows == ROWS and found.width == 1.0 and 0.0 < found.se_risk < 0.01
        assert found.kl == pytest.approx(wanted.kl) and found.se_kl == pytest.approx(0.0, abs=1e-6)
        assert found.empirical_risk == pytest.approx(wanted.empirical_risk, abs=4.0 * found.se_risk)


def normal_of(result: Fit, site: str) -> tuple[float, float]:
    params = {
        **result.message["params"],
        **{k: v[0] for k, v in result.progress.table.at.params.items()},
    }
    return float(params[f"{site}.loc"]), float(transform_to(positive)(params[f"{site}.scale"]))


def test_the_kl_of_a_hierarchy_is_that_of_both_levels() -> None:
    """O11: a Gaussian location for one client; risk and KL computed by hand."""
    data = ClientData.from_clients(
        {"a": {"y": torch.randn(40, generator=torch.Generator().manual_seed(0))}}
    )
    result = fit(fedsvi(means, guide=guides.mean_field, average=0.0), data, rounds=12)
    found = pac_bayes(result, clip=(-50.0, 50.0), draws=4000)
    z, b = normal_of(result, "g"), normal_of(result, "b")
    risk = (
        0.5 * math.log(2 * math.pi)
        + 0.5 * float((data.fields["y"] - b[0]).square().mean())
        + 0.5 * b[1] ** 2
    )
    kl_g = math.log(2.0 / z[1]) + (z[1] ** 2 + z[0] ** 2) / 8.0 - 0.5
    kl_b = -math.log(b[1]) + (b[1] ** 2 + (b[0] - z[0]) ** 2 + z[1] ** 2) / 2.0 - 0.5
    assert found.width == 100.0
    assert found.empirical_risk == pytest.approx(risk, abs=4.0 * found.se_risk)
    assert found.kl == pytest.approx(kl_g + kl_b, abs=4.0 * found.se_kl)
    assert 0.0 < found.se_kl < 0.05
    low = pac_bayes(result, clip=(1.0, 1.5), draws=20)
    assert 1.0 <= low.empirical_risk <= 1.5 and low.width == 0.5


# -------------------------------------------------------------------------- a prior from other rows
def learned(batch: ClientBatch) -> None:
    """Clients' logits about a mean that is learned without a prior."""
    loc = pyro.param("loc", torch.zeros(()))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(loc, 1.0))
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=b), obs=batch.ill)


def test_a_prior_from_some_rows_is_fixed_for_the_others() -> None:
    data = federation((30, 20, 24, 16))
    first, second = data.split(0.5, seed=0)
    before = fit(fedsvi(learned, guides.mean_field, average=0.0), first, rounds=5)
    with pytest.raises(ValueError, match="the model learns 'loc' from the same rows"):
        pac_bayes(before)
    after = before.personalize(second, rounds=5)
    found = pac_bayes(after, prior=before)
    own: Any = after.progress.table.at.params
    loc, scale = own["b.loc"].flatten(), transform_to(positive)(own["b.scale"]).flatten()
    center = before.message["params"]["loc"]
    wanted = (-scale.log() + (scale.square() + (loc - center).square() - 1.0) / 2.0).sum()
    assert found.rows == second.num_rows and found.kl == pytest.approx(float(wanted))
    for name, fitted, prior, message in (
        ("the same rows", before.personalize(first, rounds=1), before, "all rows of the bound are"),
        ("some of them", before.personalize(first.select([1]), rounds=1), before, "all rows of"),
        ("trained on both", fit(before.method, data, rounds=5), before, "has learned since"),
    ):
        with pytest.raises(ValueError, match=message):
            pac_bayes(fitted, prior=prior)
            pytest.fail(name)


def test_rows_of_few_values_are_not_taken_for_the_same() -> None:
    g = torch.Generator().manual_seed(0)
    data = ClientData.from_arrays(
        torch.arange(60) % 3, ill=(torch.rand(60, generator=g) < 0.5).double()
    )
    first, second = data.split(0.7, seed=0)
    before = fit(fedsvi(learned, guides.mean_field), first, rounds=2)
    assert pac_bayes(before.personalize(second, rounds=2), prior=before).rows == second.num_rows
    with pytest.raises(ValueError, match="all rows of the bound are"):
        pac_bayes(before.personalize(first, rounds=2), prior=before)


def test_global_sites_that_are_fixed_cost_nothing() -> None:
    first, second = federation((30, 20, 24, 16)).split(0.5, seed=0)
    before = fit(fedsvi(logistic, guides.mean_field), first, rounds=5)
    after = before.personalize(second, rounds=5)
    fixed, unsplit = pac_bayes(after, prior=before), pac_bayes(after)
    assert (
        0.0 < fixed.kl < unsplit.kl - 0.1
    )  # the second counts the global sites' KL from the model's prior


# ----------------------------------------------------------------------------------------- refusals
def penalized(batch: ClientBatch) -> None:
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.factor("pull", -b.square())
        with batch.data():
            pyro.sample("ill", dist.Bernoulli(logits=b), obs=batch.ill)


def test_what_has_no_bound_is_refused_by_name() -> None:
    data = federation()
    point = fit(fedsvi(logistic, guides.delta), data, rounds=1)
    with pytest.raises(ValueError, match="'fedsvi' places site 'loc' at a point"):
        pac_bayes(point)
    with pytest.raises(ValueError, match="places site 'slope' at a point"):
        pac_bayes(point.personalize(federation(seed=1), rounds=1), prior=point)
    resampled = fit(fedlaplace(means, draws=64, weighting_rounds=1), three(), rounds=6)
    with pytest.raises(ValueError, match=r"fedlaplace\(..., weighting_rounds=0\)"):
        pac_bayes(resampled, clip=(0.0, 5.0))
    with pytest.raises(ValueError, match="site 'pull' is a factor"):
        pac_bayes(fit(fedsvi(penalized, guides.mean_field), data, rounds=1))
    numeric = fit(fedsvi(means, guides.mean_field), three(), rounds=1)
    with pytest.raises(ValueError, match="labels of site 'y' are not classes"):
        pac_bayes(numeric)
    for clip in ((1.0, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueError, match="two finite numbers"):
            pac_bayes(numeric, clip=clip)
    with pytest.raises(ValueError, match="draws is 1"):
        pac_bayes(numeric, clip=(0.0, 5.0), draws=1)
    heads = hierfl.models.network(torch.nn.Linear(2, 2))
    classes = data.with_fields(y=data.fields["visits"].long() % 2)
    with pytest.raises(ValueError, match="from the same rows"):
        pac_bayes(
            fit(
                hierfl.methods.fedavg(heads, optimizer=hierfl.optimizers.SGD(0.1)),
                classes,
                rounds=1,
            )
        )
