"""Leave-one-out against exact refits of conjugate hierarchies and of radon."""

import warnings
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData, Fit, guides
from hierfl.diagnostics import compare, loo
from hierfl.methods import fedlaplace, fedsvi
from hierfl.posterior import arviz_io as posterior
from tests.posterior.test_corrected import planted
from tests.programs import alone, exact, federation, fit, logistic, slopes
from tests.sampled import sampled

COUNTS = (5, 3, 7, 2)


@cache
def gaussian() -> Fit:
    """Return the exact posterior of `slopes`."""
    return fit(
        fedlaplace(slopes, weighting_rounds=0, radius=10.0, settle_draws=4),
        federation(COUNTS),
        rounds=4,
    )


def without(data: ClientData, row: int) -> ClientData:
    kept = torch.arange(data.num_rows) != row
    fields = {name: data.fields[name][kept] for name in ("x", "y")}
    return ClientData.from_arrays(
        data.row_client[kept], names=data.names, x=fields["x"], y=fields["y"]
    )


# -------------------------------------------------------------------------------------- closed form
@pytest.mark.slow("1")
@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
@pytest.mark.parametrize("inner", [1, 4])
def test_leaving_a_client_out_gives_the_ratio_of_evidences(inner: int) -> None:
    data, found = federation(COUNTS), loo(gaussian(), "client", draws=2000, inner=inner)
    whole = exact(data, "slopes").log_evidence
    for name in data.names:
        rest = exact(data.select([n for n in data.names if n != name]), "slopes").log_evidence
        if found.table.loc[name, "k_hat"] < 0.7:
            assert found.table.loc[name, "elpd"] == pytest.approx(whole - rest, abs=0.15)
    assert (found.table["k_hat"] < 0.7).sum() >= 3
    assert found.elpd == pytest.approx(found.table["elpd"].sum())
    assert "by client: elpd" in repr(found)
    each = found.table["elpd"].to_numpy()
    held = posterior.elpd_of(each - 1.0, p=each, k_hat=[0.1] * 4, draws=2000)
    assert held.pareto_k.to_numpy().tolist() == [0.1] * 4
    table = posterior.compared({"b": held, "a": found.arviz})
    assert list(table.index) == ["a", "b"]
    assert table["elpd"].tolist() == pytest.approx([found.elpd, found.elpd - 4.0])


@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
def test_leaving_a_row_out_gives_the_ratio_of_evidences() -> None:
    data, found = federation(COUNTS), loo(gaussian(), draws=4000)
    whole = exact(data, "slopes").log_evidence
    assert found.table["client"].tolist() == [data.names[k] for k in data.row_client]
    checked = 0
    for row in range(data.num_rows):
        if found.table.loc[row, "k_hat"] < 0.6:
            rest = exact(without(data, row), "slopes").log_evidence
            assert found.table.loc[row, "elpd"] == pytest.approx(whole - rest, abs=0.12)
            checked += 1
    assert checked >= 10


# ------------------------------------------------------------------------ guides that are not exact
def everywhere(factor: float) -> dict[str, float]:
    """Return a factor of the local scales of all clients."""
    return dict.fromkeys(federation().names, factor)


INEXACT: dict[str, dict[str, Any]] = {
    "exact": {},
    "wide in the clients": {"own": everywhere(2.0)},
    "narrow in the clients": {"own": everywhere(0.75)},
    "wide above": {"wide": 1.4},
    "narrow above": {"wide": 0.7},
    "shifted above": {"shift": 0.6},
    "wide": {"wide": 1.3, "shift": 0.4, "own": everywhere(1.4)},
    "narrow": {"wide": 0.75, "shift": 0.4, "own": everywhere(0.75)},
}
SEEDS = 4


def without_each(data: ClientData, by: str) -> np.ndarray[Any, Any]:
    """Return the exact leave-one-out densities of `slopes`, by client or by row."""
    rest = (
        [data.select([n for n in data.names if n != name]) for name in data.names]
        if by == "client"
        else [
            without(data, row) for row in range(data.num_rows - 1)
        ]  # the last is all of its client
    )
    whole = exact(data, "slopes").log_evidence
    return np.array([whole - exact(part, "slopes").log_evidence for part in rest])


@pytest.mark.slow("narrow-row")
@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
@pytest.mark.parametrize(("case", "by"), sampled(product(INEXACT, ["client", "row"]), 3))
def test_an_inexact_guide_gives_the_exact_density(by: Any, case: str) -> None:
    """The mean over seeds is the ratio of evidences; k-hat names the exceptions."""
    fitted, wanted = planted(**INEXACT[case]), without_each(federation(), by)
    tables = [loo(fitted, by, seed=seed).table[: len(wanted)] for seed in range(SEEDS)]
    elpd, k_hat, mc_se = (
        np.stack([table[name].to_numpy() for table in tables])
        for name in ("elpd", "k_hat", "mc_se")
    )
    good = k_hat.max(0) < 0.6
    assert good.sum() >= {"client": 3, "row": 8}[by]
    off = elpd.mean(0) - wanted
    assert (np.abs(off) < 0.02 + 3.5 * mc_se.mean(0) / SEEDS**0.5)[good].all(), off[good]
    assert np.abs(off)[good].max() < {"client": 0.06, "row": 0.12}[by]


def test_monte_carlo_errors_are_those_of_repetitions() -> None:
    fitted = planted(own=everywhere(1.4), wide=1.2)
    found = [loo(fitted, "client", draws=1000, seed=seed).table for seed in range(12)]
    spread = np.stack([table["elpd"].to_numpy() for table in found]).std(0, ddof=1)
    said = np.stack([table["mc_se"].to_numpy() for table in found]).mean(0)
    assert (np.abs(np.log(spread / said)) < np.log(1.8)).all(), (spread, said)


@pytest.mark.slow("0.75")
@pytest.mark.parametrize("factor", [2.0, 0.75])
def test_likelihoods_that_are_divided_by_have_enough_local_draws(factor: float) -> None:
    """Without weights p(y_k | z) stands in a denominator: eight draws are too few."""
    found = loo(planted(own=everywhere(factor)), "client", correct=None).table
    off = found["elpd"].to_numpy() - without_each(federation(), "client")
    assert np.abs(off).max() < 0.05


def test_noise_that_no_number_of_local_draws_removes_is_said() -> None:
    fitted = planted(own={"east": 0.12})
    with pytest.warns(UserWarning, match="the likelihood of client 'east' is still noisy"):
        loo(fitted, "client", correct=None, draws=200)


@pytest.mark.slow
def test_points_that_the_method_has_weighted_are_taken_for_the_posterior() -> None:
    data = federation(COUNTS)
    fitted = fit(fedlaplace(slopes, draws=1024, weighting_rounds=1, radius=10.0), data, rounds=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, same = (loo(fitted, "client", correct=how).table for how in ("psis", None))
    off = np.abs(table["elpd"].to_numpy() - without_each(data, "client"))
    good = (table["k_hat"] < 0.6).to_numpy()
    assert good.sum() >= 2 and off[good].max() < 0.15
    assert table.equals(same)


# ------------------------------------------------------------------------ nothing above the clients
def test_clients_that_share_nothing_have_their_own_evidence() -> None:
    data = federation(COUNTS)
    fitted = fit(fedsvi(alone, guides.mean_field(init_scale=0.6)), data, rounds=2)
    found = loo(fitted, "client", draws=4000).table
    for name, y in zip(data.names, data.fields["y"].split(data.counts.tolist()), strict=True):
        cov = torch.eye(len(y)) + torch.ones(len(y), len(y))
        wanted = dist.MultivariateNormal(torch.zeros(len(y)), cov).log_prob(y)
        if found.loc[name, "k_hat"] < 0.7:
            off = float(found.loc[name, "elpd"]) - float(wanted)
            assert abs(off) < 0.03 + 4.0 * float(found.loc[name, "mc_se"])
    assert (found["k_hat"] < 0.7).sum() >= 3


def learned(batch: ClientBatch) -> None:
    """Clients about a mean that is learned without a prior."""
    loc = pyro.param("loc", torch.zeros(()))
    with batch.clients():
        b = pyro.sample("b", dist.Normal(loc, 0.3))
        with batch.data():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


def test_params_that_are_learned_leave_no_client_out() -> None:
    """Refused by client; by row a warning says by how many nats they flatter the fit."""
    g = torch.Generator().manual_seed(0)
    sd, y = 1.09**0.5, torch.randn(40, generator=g)
    y = sd * (y - y.mean()) / y.std(correction=0)
    data = ClientData.from_arrays(torch.arange(40), y=y)
    method = fedsvi(
        learned, guides.conditional(newton_steps=0), optimizer=hierfl.optimizers.Adam(0.3)
    )
    fitted = fit(method, data, rounds=20)
    with pytest.raises(ValueError, match="the model learns 'loc' from the rows of all clients"):
        loo(fitted, "client")
    with pytest.warns(UserWarning, match="elpd is too high by about 1 nats"):
        found = loo(fitted)
    rest = (y.sum() - y) / 39.0  # each client has one row, and the mean without it is exact
    wanted = float(dist.Normal(rest, sd).log_prob(y).sum())
    assert found.elpd - wanted == pytest.approx(1.0, abs=0.3)


# --------------------------------------------------------------------------------------- comparison
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* have a k-hat above")
def test_the_better_model_comes_first() -> None:
    data, g = federation((20, 20, 20)), torch.Generator().manual_seed(1)
    ill = (torch.rand(60, generator=g) < torch.sigmoid(3.0 * data.fields["x"].sum(-1))).double()
    noise = torch.randn(60, 2, generator=g)
    data = data.with_fields(ill=ill)
    fast = hierfl.optimizers.Adam(0.1)
    method = fedsvi(logistic, guides.conditional(newton_steps=3), optimizer=fast)
    right = fit(method, data, rounds=8)
    rows, clients = loo(right, draws=200), loo(right, "client", draws=200)
    other = loo(fit(method, data.with_fields(x=noise), rounds=8), draws=200)
    table = compare({"noise": other, "right": rows})
    assert list(table.index) == ["right", "noise"] and table.loc["noise", "elpd_diff"] > 0.0
    assert list(table.columns) == ["rank", "elpd", "p", "elpd_diff", "weight", "se", "dse", "k_hat"]
    assert table.loc["right", "k_hat"] == pytest.approx(rows.table["k_hat"].max())
    with pytest.raises(ValueError, match="leaves out one row at a time, 'b' one client"):
        compare({"a": rows, "b": clients})
    with pytest.raises(ValueError, match="'a' and 'b' are fitted to different rows"):
        compare(
            {"a": right, "b": fit(method, data.with_fields(ill=1.0 - ill), rounds=2)}, draws=200
        )
    with pytest.raises(ValueError, match="fits has 1 entries"):
        compare({"a": right})


# ---------------------------------------------------------------------------- refusals and warnings
def test_invalid_arguments_are_refused() -> None:
    fitted = gaussian()
    with pytest.raises(ValueError, match="draws is 10: it must be 100 or more"):
        loo(fitted, draws=10)
    with pytest.raises(ValueError, match="by is 'hospital': it must be one of 'row', 'client'"):
        loo(fitted, "hospital")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="the model observes no site 'z'"):
        loo(fitted, site="z")
    point = fit(fedsvi(slopes, guides.delta), federation(), rounds=1)
    with pytest.raises(ValueError, match="correct is 'is': it must be one of 'psis', None"):
        loo(fitted, correct="is")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all draws of 'fedsvi' are the same point"):
        loo(point, draws=100, correct=None)
    for by in ("row", "client"):
        with pytest.raises(ValueError, match="places site 'g' at points"):
            loo(point, by, draws=100)
    unlabeled = replace(
        fitted, federation=replace(fitted.federation, data=federation(COUNTS).without("y"))
    )
    sides: tuple[Any, ...] = ("row", "client")
    for by in sides:
        with pytest.raises(ValueError, match="the clients' rows have no"):
            loo(unlabeled, by, draws=100)


@pytest.mark.slow
def test_an_outlying_client_raises_a_warning() -> None:
    data = federation((10, 10, 10, 10))
    y = data.fields["y"].clone()
    y[:10] += 40.0 * data.fields["x"][:10, 0]
    fitted = fit(
        fedlaplace(slopes, weighting_rounds=0, radius=100.0, settle_draws=4),
        data.with_fields(y=y),
        rounds=8,
    )
    with pytest.warns(UserWarning, match="of 4 clients have a k-hat above 0.7") as caught:
        found = loo(fitted, "client", draws=400)
    assert {warning.filename for warning in caught} == {__file__}  # not a file of hierfl
    assert found.table["k_hat"].idxmax() == "north"
