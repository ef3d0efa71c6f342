"""Profiles: effects and ranks of known deviations, ratios by hand, limits against scipy and by simulation."""

from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

from hierfl.effects.drawn import CoefficientDraws
from hierfl.effects.profile import (
    beyond,
    funnel_curves,
    funnel_limits,
    own_effects,
    profile,
    ratio_interval,
    sums_of_client,
)
from tests.effects.made import drawn, frame, repeated

matplotlib.use("agg")


def apart(family: str = "bernoulli", text: str = "died ~ age + (1 | site)") -> CoefficientDraws:
    """Clients 2 apart on the linear predictor, with sds of 0.1."""
    found = repeated(drawn(text, family, draws=2), 400)
    means = torch.tensor([2.0, -2.0, 4.0, 0.0]).double()
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)).double()
    shared = {**found.shared, "age": torch.zeros(400).double()}
    shared["Intercept_centered"] = torch.full((400,), -1.0).double()
    return replace(found, shared=shared, own={"site": -1.0 + means + 0.1 * noise})


def test_well_separated_clients_have_their_ranks_for_certain() -> None:
    found = profile(apart()).frame
    assert list(found["rank"]) == [3.0, 1.0, 4.0, 2.0]
    assert list(found["rank_low"]) == list(found["rank_high"]) == [3, 1, 4, 2]
    assert list(found["p_best"]) == [0.0, 1.0, 0.0, 0.0]
    assert list(found["p_worst"]) == [0.0, 0.0, 1.0, 0.0]
    np.testing.assert_allclose(found["effect"], [2.0, -2.0, 4.0, 0.0], atol=0.02)
    np.testing.assert_allclose(found["effect_sd"], 0.1, rtol=0.15)
    highest = profile(apart(), best="high").frame
    assert list(highest["rank"]) == [2.0, 4.0, 1.0, 3.0]


def test_equal_clients_have_ranks_that_are_uniform() -> None:
    found = apart()
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)).double()
    table = profile(replace(found, own={"site": noise})).frame
    np.testing.assert_allclose(table["rank"], 2.5, atol=0.25)
    np.testing.assert_allclose(table["p_best"], 0.25, atol=0.08)
    assert (table["rank_low"] == 1).all() and (table["rank_high"] == 4).all()


def test_effects_are_those_of_a_typical_row_where_clients_have_slopes() -> None:
    """The own intercept alone is that of age 0, which no row has."""
    found = drawn("y ~ age + (1 + age | site)")
    (term,) = found.layout.groups
    own = found.of_client(term, 2)[..., 0]
    wanted = own[:, 0] + own[:, 1] * frame()["age"].mean()
    torch.testing.assert_close(own_effects(found, "Intercept")[:, 2], wanted)
    torch.testing.assert_close(own_effects(found, "age")[:, 2], own[:, 1])


def test_effects_leave_out_what_lies_above_the_client() -> None:
    found = drawn("y ~ beds + dose + (1 | site) + (1 | region)")
    k = found.clients.index("west")
    means = found.base[:, 0] + found.shared["region"][:, 1]
    torch.testing.assert_close(
        own_effects(found, "Intercept")[:, k], found.own["site"][:, k] - means
    )


def test_the_standardized_ratio_is_observed_over_expected() -> None:
    """Under the average client each row has the probability 1 / (1 + e)."""
    found, rows = apart(), frame()
    table = profile(found).frame.set_index("client")
    died = rows.groupby("site")["died"].agg(["sum", "size"]).loc[list(found.clients)]
    np.testing.assert_allclose(table["observed"], died["sum"])
    np.testing.assert_allclose(table["expected"], died["size"] / (1 + np.e), rtol=1e-6)
    np.testing.assert_allclose(table["smr"], table["observed"] / table["expected"])
    k = 2
    p = torch.sigmoid(found.own["site"][:, k]).numpy()
    np.testing.assert_allclose(table["ratio"].iloc[k], (p * (1 + np.e)).mean(), rtol=1e-6)
    low, high = stats.binomtest(int(died["sum"].iloc[k]), int(died["size"].iloc[k])).proportion_ci(
        0.9
    )
    np.testing.assert_allclose(table["smr_low"].iloc[k], low * (1 + np.e), rtol=1e-6)
    np.testing.assert_allclose(table["smr_high"].iloc[k], high * (1 + np.e), rtol=1e-6)


def test_binomial_rows_count_their_trials() -> None:
    found = apart("binomial", "k | trials(n) ~ age + (1 | site)")
    rows = frame().query("site == 'south'")
    observed, trials, expected, _ = sums_of_client(found, found.clients.index("south"))
    assert (observed, trials) == (rows["k"].sum(), rows["n"].sum())
    np.testing.assert_allclose(expected, rows["n"].sum() / (1 + np.e), rtol=1e-6)


def test_limits_of_counts_are_garwoods() -> None:
    low, high = ratio_interval(7.0, 5.0, None, prob=0.9)
    np.testing.assert_allclose(low, stats.chi2.ppf(0.05, 14) / 2 / 5)
    np.testing.assert_allclose(high, stats.chi2.ppf(0.95, 16) / 2 / 5)
    assert ratio_interval(0.0, 5.0, None, prob=0.9)[0] == 0.0
    assert ratio_interval(0.0, 5.0, 9.0, prob=0.9)[0] == 0.0
    assert ratio_interval(9.0, 5.0, 9.0, prob=0.9)[1] == 9.0 / 5.0


@pytest.mark.parametrize("rate", [None, 0.3])
def test_funnel_limits_hold_the_share_of_in_control_clients(rate: float | None) -> None:
    expected = np.array([30.0, 90.0])
    rng = np.random.default_rng(0)
    size = (40_000, 2)
    counts = rng.poisson(expected, size) if rate is None else rng.binomial([100, 300], 0.3, size)
    for prob in (0.95, 0.998):
        low, high = funnel_limits(expected, rate, prob)
        inside = ((counts / expected >= low) & (counts / expected <= high)).mean(0)
        np.testing.assert_allclose(inside, prob, atol=0.02 if prob == 0.95 else 0.002)
    # by the Normal approximation
    sd = np.sqrt((1.0 if rate is None else 1.0 - rate) / expected)
    np.testing.assert_allclose(funnel_limits(expected, rate, 0.95)[1], 1 + 1.96 * sd, atol=0.05)


def test_clients_beyond_the_limits_are_named_in_the_funnel() -> None:
    assert [beyond(n, 30.0, None) for n in (30.0, 43.0, 60.0)] == ["inside", "95%", "99.8%"]
    found = profile(apart())
    ax = found.plot_funnel()
    named = {text.get_text() for text in ax.texts}
    assert named == set(found.frame.query("funnel != 'inside'")["client"])
    curves = funnel_curves(found.frame["expected"], found.rate)
    assert list(curves["limits"].unique()) == ["95%", "99.8%"]
    assert (curves["low"] < 1.0).all() and (curves["high"] > 1.0).all()


def test_ranks_are_drawn_in_order() -> None:
    found = profile(apart())
    labels = [text.get_text() for text in found.plot_ranks().get_yticklabels()]
    order = found.frame.sort_values("rank")["client"]
    assert [label.split("  ")[0] for label in labels] == list(order)


def test_what_has_no_profile_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no groups by client.* add \(1 \| site\)"):
        profile(drawn("y ~ age", draws=2))
    with pytest.raises(KeyError, match="no own coefficient of 'dose': they have Intercept, age"):
        profile(drawn("y ~ age + (1 + age | site)", draws=2), "dose")
    with pytest.raises(ValueError, match="no standardized ratio"):
        profile(drawn("y ~ age + (1 | site)")).plot_funnel()
    with pytest.raises(ValueError, match="categorical has 2 effects per client"):
        profile(drawn("grade ~ dose + (1 | site)", "categorical", draws=2))
