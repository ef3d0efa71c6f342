"""Survival curves are the closed forms of their families, by client, for a new one and for the average one."""

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

from hierfl.effects.conditional_effects import survival
from hierfl.models import families
from tests.effects.made import CLIENTS, drawn, frame, repeated, with_shared

matplotlib.use("agg")
TIMES = [0.0, 0.5, 2.0, 9.0]


def test_exponential_and_weibull_are_closed_forms() -> None:
    found = with_shared(drawn("time | event(seen) ~ dose", "exponential"), Intercept=1.0, dose=0.0)
    table = survival(found, times=TIMES, client=None).frame
    np.testing.assert_allclose(table["mean"], np.exp(-np.array(TIMES) / np.e), rtol=1e-6)
    found = with_shared(
        drawn("time | event(seen) ~ dose", "weibull"), Intercept=1.0, dose=0.0, shape=2.0
    )
    scale = np.e / stats.weibull_min(2.0).mean()
    table = survival(found, times=TIMES, client=None).frame
    np.testing.assert_allclose(
        table["mean"], stats.weibull_min(2.0, scale=scale).sf(TIMES), rtol=1e-5
    )


def test_log_normal_and_piecewise_exponential_are_closed_forms() -> None:
    found = with_shared(drawn("time ~ dose", "lognormal"), Intercept=0.5, dose=0.0, sigma=0.7)
    table = survival(found, times=TIMES, client=None).frame
    wanted = stats.lognorm(0.7, scale=np.exp(0.5)).sf(TIMES)
    np.testing.assert_allclose(table["mean"], wanted, rtol=1e-5, atol=1e-9)
    pieces = families.piecewise_exponential((1.0, 4.0))
    found = with_shared(drawn("time ~ dose", pieces), dose=0.0, log_hazard=np.log([0.1, 0.2, 0.4]))
    table = survival(found, times=TIMES, client=None).frame
    np.testing.assert_allclose(table["mean"], np.exp([0.0, -0.05, -0.3, -2.7]), rtol=1e-5)


def test_hazards_are_proportional_at_another_value() -> None:
    found = with_shared(drawn("time ~ arm", "exponential"), Intercept=1.0, arm=[0.7, 0.0])
    a, b = (survival(found, at={"arm": arm}, times=[3.0], client=None).frame for arm in "ab")
    np.testing.assert_allclose(np.log(b["mean"]) / np.log(a["mean"]), np.exp(-0.7), rtol=1e-5)


def test_each_client_and_a_new_one_have_a_curve() -> None:
    found = drawn("time | event(seen) ~ dose + (1 | site)", "exponential")
    result = survival(found, at={"dose": 0.0})
    table = result.frame
    assert list(table["client"].unique()) == [*found.clients, "new"]
    assert set(found.clients) == set(CLIENTS)
    np.testing.assert_allclose(table["time"].max(), 2 * frame()["time"].mean(), rtol=1e-5)
    part = table.query("client == 'east'")
    k = found.clients.index("east")
    rate = torch.exp(-found.own["site"][:, k]).numpy()
    wanted = np.exp(-rate[:, None] * part["time"].to_numpy())
    np.testing.assert_allclose(part["mean"], wanted.mean(0), rtol=1e-5, atol=1e-9)
    assert result.plot().get_legend_handles_labels()[1] == [*found.clients, "new client"]


def test_a_new_clients_curve_is_averaged_over_the_group_level() -> None:
    found = repeated(drawn("time ~ dose + (1 | site)", "exponential"), 4000)
    found = with_shared(found, Intercept=1.0, dose=0.0, sd_site=0.8)
    eta = 1.0 + 0.8 * np.random.default_rng(0).standard_normal(100_000)
    wanted = np.exp(-3.0 * np.exp(-eta))
    table = survival(found, times=[3.0], client="new").frame
    np.testing.assert_allclose(table["mean"], wanted.mean(), atol=0.015)
    np.testing.assert_allclose(table["low"], np.quantile(wanted, 0.05), atol=0.02)


def test_what_has_no_survival_is_refused() -> None:
    with pytest.raises(ValueError, match="the response is gaussian, not a time"):
        survival(drawn("y ~ dose", draws=2))
    found = drawn("time ~ dose", "exponential", draws=2)
    for times in ([-1.0], [], [np.nan]):
        with pytest.raises(ValueError, match="give one or more that are finite and 0 or later"):
            survival(found, times=times)


def test_each_value_of_a_column_has_a_curve() -> None:
    found = drawn("time ~ arm + dose + (1 | site)", "weibull")
    both = survival(found, by="arm", times=TIMES, client=["east", "west"])
    for arm in "abc":
        one = survival(found, at={"arm": arm}, times=TIMES, client=["east", "west"])
        table = both.frame.query("arm == @arm")
        assert list(table["client"]) == list(one.frame["client"])
        np.testing.assert_allclose(table["mean"], one.frame["mean"], rtol=1e-12)
        np.testing.assert_allclose(both.draws.sel(arm=arm), one.draws, rtol=1e-12)
    assert both.draws.dims == ("chain", "draw", "client", "arm", "time")
    doses = survival(found, by="dose", times=[1.0], client=None).frame["dose"]
    rows = frame()["dose"]
    np.testing.assert_allclose(doses, rows.mean() + rows.std(ddof=0) * np.array([-1, 0, 1]))
    labels = both.plot().get_legend_handles_labels()[1]
    assert labels[:3] == ["east, arm a", "east, arm b", "east, arm c"]
    with pytest.raises(ValueError, match="'arm' is to vary, and at holds it fixed"):
        survival(found, by="arm", at={"arm": "a"})
