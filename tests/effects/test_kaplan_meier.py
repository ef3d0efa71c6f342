"""Kaplan-Meier curves and log-rank tests, beside scipy and the published numbers of the lung data."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import hierfl
from hierfl.datasets.files import columns as columns_of
from hierfl.datasets.tables import _LUNG
from hierfl.formulas.time_answers import Observed, times_answer


def made(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    g = np.random.default_rng(seed)
    arm = g.choice(["new", "old"], rows)
    time = np.ceil(100.0 * g.weibull(1.3, rows) * np.where(arm == "new", 1.4, 1.0))
    end = np.ceil(g.uniform(20.0, 220.0, rows))
    site = g.choice(["a", "b", "c"], rows)
    status = (time <= end).astype(float)
    return pd.DataFrame({"site": site, "arm": arm, "time": np.minimum(time, end), "status": status})


def formula(text: str = "time | event(status) ~ arm + (1 | site)") -> hierfl.Formula:
    return hierfl.formula(text, "weibull", clients="site")


def censored(part: pd.DataFrame) -> Any:
    return stats.CensoredData.right_censored(part["time"], part["status"] == 0)


def test_curves_and_the_pooled_test_are_those_of_scipy() -> None:
    frame = made()
    found = hierfl.kaplan_meier(frame, formula(), by="arm", prob=0.95)
    for arm, part in frame.groupby("arm"):
        reference = stats.ecdf(censored(part)).sf
        ends = reference.confidence_interval(0.95, method="log-log")
        ours = found.frame[(found.frame["group"] == arm) & (found.frame["survival"] < 1.0)]
        for name, of in (("survival", reference), ("low", ends.low), ("high", ends.high)):
            np.testing.assert_allclose(ours[name], of.evaluate(ours["time"]), atol=1e-12)
    test = stats.logrank(*(censored(part) for _, part in frame.groupby("arm")))
    pooled = found.tests.loc["pooled"]
    assert pooled["df"] == 1 and abs(pooled["chi2"] - test.statistic**2) < 1e-9
    assert abs(pooled["p"] - test.pvalue) < 1e-9


def test_curves_are_in_the_order_of_a_category() -> None:
    frame = made()
    frame["arm"] = pd.Categorical(frame["arm"], ["old", "new"])
    assert [*hierfl.kaplan_meier(frame, formula(), by="arm").groups["group"]] == ["old", "new"]


def test_the_test_by_client_is_that_of_strata() -> None:
    """O - E and variances of each site alone, from scipy's z and its definition, added up."""
    frame, excess, variance = made(), 0.0, 0.0
    for _, part in frame.groupby("site"):
        new = part["arm"] == "new"
        own_excess = own_variance = 0.0
        for t in part.loc[part["status"] == 1, "time"].unique():
            n, n1 = (part["time"] >= t).sum(), ((part["time"] >= t) & new).sum()
            at = (part["time"] == t) & (part["status"] == 1)
            d, d1 = at.sum(), (at & new).sum()
            own_excess += d1 - d * n1 / n
            own_variance += d * n1 / n * (1 - n1 / n) * (n - d) / max(n - 1, 1)
        z = stats.logrank(censored(part[new]), censored(part[~new])).statistic
        assert abs(abs(z) - abs(own_excess) / own_variance**0.5) < 1e-9
        excess, variance = excess + own_excess, variance + own_variance
    for least, near in ((1, 0.01), (5, 0.5)):  # of 17.9
        found = hierfl.kaplan_meier(frame, formula(), by="arm", least_count=least)
        assert abs(found.tests.loc["by client", "chi2"] - excess**2 / variance) < near


def test_rounded_sums_of_three_groups_have_two_degrees_of_freedom() -> None:
    frame = made()
    frame["arm"] = np.random.default_rng(1).choice(["new", "old", "none"], len(frame))
    exact, rounded = (
        hierfl.kaplan_meier(frame, formula(), by="arm", least_count=least).tests.loc["by client"]
        for least in (1, 5)
    )
    assert exact["df"] == rounded["df"] == 2 and abs(exact["chi2"] - rounded["chi2"]) < 0.5


@pytest.mark.usefixtures("data_files")
def test_the_lung_data_have_their_published_numbers() -> None:
    """R: survfit(Surv(time, status) ~ sex, conf.type = "log-log") and survdiff, of 228 rows."""
    frame = columns_of(_LUNG).assign(site="one")
    frame["sex"] = frame["sex"].map({1: "male", 2: "female"})
    found = hierfl.kaplan_meier(frame, formula("time | event(status) ~ 1"), by="sex", prob=0.95)
    male, female = (found.groups.set_index("group").loc[name] for name in ("male", "female"))
    assert (male["rows"], male["events"], male["median"]) == (138, 112, 270)
    assert (female["rows"], female["events"], female["median"]) == (90, 53, 426)
    assert abs(found.tests.loc["pooled", "chi2"] - 10.3267) < 1e-3


# ------------------------------------------------------------ late entry, weights, time 0
def late(rows: int = 400) -> pd.DataFrame:
    """Rows that are observed from a later time on, of two weights, some of whom leave at time 0."""
    g = np.random.default_rng(5)
    frame = made(rows)
    frame["start"] = np.where(g.random(rows) < 0.3, -1.0, np.floor(g.random(rows) * frame["time"]))
    frame["start"] = np.minimum(frame["start"], frame["time"] - 1.0)
    frame["w"] = g.integers(1, 4, rows)
    frame.loc[(frame["start"] < 0.0) & (g.random(rows) < 0.2), "time"] = 0.0
    return frame


LATE = "time | event(status) + entry(start) ~ arm + (1 | site)"


def product(frame: pd.DataFrame) -> tuple[Any, Any, Any]:
    """Times of events, survival and Greenwood's sum: a row is at risk at t if start < t <= time."""
    when = np.unique(frame.loc[frame["status"] == 1, "time"])
    start, end, w = (frame[name].to_numpy()[:, None] for name in ("start", "time", "w"))
    risk = (w * ((start < when) & (when <= end))).sum(0)
    events = (w * ((end == when) & (frame["status"].to_numpy()[:, None] == 1))).sum(0)
    return when, (1 - events / risk).cumprod(), (events / (risk * (risk - events))).cumsum()


def test_late_entries_and_weights_are_those_of_the_product_limit() -> None:
    frame = late()
    text = "time | event(status) + entry(start) + weights(w) ~ arm + (1 | site)"
    found = hierfl.kaplan_meier(frame, formula(text), prob=0.95).frame.set_index("time")
    when, survival, spread = product(frame)
    assert when[0] == 0.0 and survival[-1] > 0.0
    ours = found.loc[when]
    np.testing.assert_allclose(ours["survival"], survival, rtol=1e-9)
    half = stats.norm.ppf(0.975) * np.sqrt(spread) / np.log(survival)
    np.testing.assert_allclose(ours["low"], survival ** np.exp(-half), rtol=1e-9)
    assert found["at_risk"].min() > 0.0 and set(found.index) <= set(frame["time"])


def test_a_weight_is_that_many_rows() -> None:
    frame = late()
    text = "time | event(status) + entry(start) + weights(w) ~ arm + (1 | site)"
    weighted = hierfl.kaplan_meier(frame, formula(text), by="arm")
    several = frame.loc[frame.index.repeat(frame["w"])]
    repeated = hierfl.kaplan_meier(several, formula(LATE), by="arm")
    pd.testing.assert_frame_equal(weighted.frame, repeated.frame)
    pd.testing.assert_frame_equal(weighted.tests, repeated.tests)
    assert weighted.groups["events"].tolist() == repeated.groups["events"].tolist()


def test_late_entries_of_groups_are_compared_where_both_are_at_risk() -> None:
    """The score test of Cox's model, by its definition."""
    frame = late()
    when = np.unique(frame.loc[frame["status"] == 1, "time"])
    start, end = (frame[name].to_numpy()[:, None] for name in ("start", "time"))
    new, event = (frame["arm"] == "new").to_numpy(), (frame["status"] == 1).to_numpy()
    there = (start < when) & (when <= end)
    n, n1 = there.sum(0), there[new].sum(0)
    at = (end == when) & event[:, None]
    d, d1 = at.sum(0), at[new].sum(0)
    excess = (d1 - d * n1 / n).sum()
    variance = (d * n1 / n * (1 - n1 / n) * (n - d) / np.maximum(n - 1, 1)).sum()
    tests = hierfl.kaplan_meier(frame.assign(site="one"), formula(LATE), by="arm").tests
    np.testing.assert_allclose(tests["chi2"], excess**2 / variance, rtol=1e-9)


def test_clients_pooled_are_the_rows_together() -> None:
    frame = late()
    apart = hierfl.kaplan_meier(frame, formula(LATE), by="arm")
    whole = hierfl.kaplan_meier(frame.assign(site="one"), formula(LATE), by="arm")
    pd.testing.assert_frame_equal(apart.frame, whole.frame)
    np.testing.assert_allclose(apart.tests.loc["pooled"], whole.tests.loc["pooled"], rtol=1e-9)


def test_a_life_table_with_late_entries_is_near_the_curve() -> None:
    frame = late(4000)
    found = hierfl.kaplan_meier(frame, formula(LATE), least_count=10).frame
    when, survival, _ = product(frame.assign(w=1.0))
    assert found["time"].iloc[0] == 0.0 and len(found) > 12
    at = np.searchsorted(when, found["time"], side="right") - 1
    assert np.abs(found["survival"].to_numpy() - survival[at]).max() < 0.03


# Time -> survival and its 95% interval, KaplanMeierFitter().fit(t, d, entry=e, weights=w) of lifelines
LIFELINES = {
    0.0: (0.758621, 0.559429, 0.876876),
    24.0: (0.586033, 0.409975, 0.725962),
    60.0: (0.370443, 0.242003, 0.499043),
    104.0: (0.149999, 0.079986, 0.240538),
    189.0: (0.020408, 0.002467, 0.080274),
}


def test_groups_with_late_entries_are_compared_by_ranges_too() -> None:
    """Ranges begin where every group has enough rows at risk: before, too few have entered."""
    frame = late(2000).assign(site="one").query("start >= 0")
    exact, coarse = (
        hierfl.kaplan_meier(frame, formula(LATE), by="arm", least_count=least).tests.loc[
            "by client"
        ]
        for least in (1, 5)
    )
    assert coarse["df"] == exact["df"] == 1
    assert coarse["chi2"] == pytest.approx(exact["chi2"], rel=0.3)


def test_numbers_of_lifelines() -> None:
    frame = late(40)
    text = "time | event(status) + entry(start) + weights(w) ~ arm + (1 | site)"
    found = hierfl.kaplan_meier(frame, formula(text), prob=0.95).frame.set_index("time")
    for time, wanted in LIFELINES.items():
        np.testing.assert_allclose(found.loc[time, ["survival", "low", "high"]], wanted, atol=1e-6)


def test_a_life_table_of_ranges_is_near_the_curve() -> None:
    frame = made(2000)
    exact, coarse = (
        hierfl.kaplan_meier(frame, formula(), by="arm", least_count=least).frame
        for least in (1, 10)
    )
    for arm in ("new", "old"):
        ours, all_of_it = (one[one["group"] == arm] for one in (coarse, exact))
        assert len(ours) > 12
        ours = ours[ours["at_risk"] > 100.0]
        at = np.searchsorted(all_of_it["time"], ours["time"], side="right") - 1
        assert (
            np.abs(ours["survival"].to_numpy() - all_of_it["survival"].to_numpy()[at]).max() < 0.03
        )


def test_no_count_of_times_is_of_few_rows() -> None:
    g = np.random.default_rng(0)
    times, events = g.exponential(10.0, 100), g.random(100) < 0.7
    rows = Observed(times, events, np.full(100, -np.inf), np.ones(100))
    found = times_answer(rows, 6)
    assert (np.diff([0, *found.exits, 100]) >= 6).all() and times.max() > found.ends[-1]
    assert all(
        event % 6 == 0 or event == gone
        for event, gone in zip(found.events, found.exits, strict=True)
    )
    frame = made(60)
    frame.loc[frame.index[:57], "arm"] = "old"  # three of another arm, whose number would be known
    frame.loc[frame.index[57:], "arm"] = "new"
    with pytest.raises(ValueError, match="nothing may leave"):
        hierfl.kaplan_meier(frame.assign(site="a"), formula(), by="arm", least_count=5)


def test_it_draws_steps() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    hierfl.kaplan_meier(made(), formula(), by="arm").plot(axes)
    assert [line.get_label() for line in axes.lines] == ["new", "old"]
    assert axes.lines[0].get_drawstyle() == "steps-post" and axes.get_xlabel() == "time"


TEXT = "time | event(status) ~ arm + (1 | site)"
# Words -> formula, what its columns hold, and arguments.
WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    r"has trunc\(...\), of which no Kaplan-Meier": ("time | trunc(lb=1) ~ arm", {}, {}),
    "column 'start' of client 'a' must be below 'time'": (LATE, {"start": 1000.0}, {}),
    r"has weights\(w\), which could be solved for": (
        "time | event(status) + weights(w) ~ arm", {"w": 1.0}, {"least_count": 5}
    ),
    "column 'status' of client 'a' holds 'yes', .* as a number": (TEXT, {"status": "yes"}, {}),
    "column 'time' of client 'a' holds 'soon', .* as a number": (TEXT, {"time": "soon"}, {}),
    "must be finite and not below 0": (TEXT, {"time": -1.0}, {}),
    "must be 0 or 1, .* of several causes, make a column": (TEXT, {"status": 2.0}, {}),
    "prob is 95": (TEXT, {}, {"prob": 95}),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_has_no_curve_is_refused_by_name(words: str) -> None:
    text, columns, options = WRONG[words]
    with pytest.raises(ValueError, match=words):
        hierfl.kaplan_meier(made().assign(**columns), formula(text), **options)
