"""Do effects on the hazard change with time? Beside a refit of Cox's likelihood with x g(t), and lifelines."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import optimize

import hierfl
from hierfl.datasets.files import columns as columns_of
from hierfl.datasets.tables import _LUNG
from hierfl.effects.proportional_hazards import course_of, score_tests, verdict
from tests.effects.made import drawn


def made(rows: int, turn: float, seed: int = 0) -> pd.DataFrame:
    """Return times whose log hazard ratio of `x` is 0.8, and after time 1 `turn` more."""
    g = np.random.default_rng(seed)
    x, z = g.normal(size=rows), g.normal(size=rows)
    first = np.exp(0.8 * x - 0.4 * z)
    second = first * np.exp(turn * x)
    left = g.exponential(size=rows)
    time = np.where(left < first, left / first, 1.0 + (left - first) / second)
    end = g.uniform(0.3, 4.0, rows)
    site = g.choice(["a", "b", "c"], rows)
    return pd.DataFrame(
        {"site": site, "x": x, "z": z, "time": np.minimum(time, end), "status": 1.0 * (time <= end)}
    )


def negative(theta: Any, time: Any, event: Any, x: Any, g: Any) -> float:
    """Return Cox's negative log partial likelihood of coefficients b, c of x and x g(t), at distinct times."""
    size = x.shape[1]
    total = 0.0
    for k, row in enumerate(np.flatnonzero(event)):
        eta = x @ (theta[:size] + theta[size:] * g[k])
        there = time >= time[row]
        total -= eta[row] - np.log(np.exp(eta[there]).sum())
    return total


@pytest.mark.parametrize("turn", [0.0, -1.5])
def test_the_score_test_is_near_a_likelihood_ratio_of_refits(turn: float) -> None:
    frame = made(220, turn).sort_values("time")
    time, event = frame["time"].to_numpy(), frame["status"].to_numpy() == 1.0
    x = frame[["x", "z"]].to_numpy()
    at = np.log(time[event])
    g = (at - at.min()) / np.ptp(at)
    both = optimize.minimize(negative, np.zeros(4), (time, event, x, g), method="BFGS")
    plain = optimize.minimize(
        lambda b: negative(np.r_[b, 0, 0], time, event, x, g), np.zeros(2), method="BFGS"
    )
    ratio = 2.0 * (plain.fun - both.fun)
    away = plain.x + 0.1  # a posterior mean need not be the best value
    risk = np.exp(x @ away)
    course = course_of(time, event, np.zeros(len(time)), risk, x, np.ones(len(time)))
    lines, _ = score_tests(course, "log", away)
    assert abs(lines["chi2"][-1] - ratio) < 0.25 * ratio + 0.3 and lines["df"][-1] == 2
    assert np.abs(lines["change"][:2] - both.x[2:]).max() < 0.6 * min(lines["se"][:2])
    if turn:
        assert lines["p"][0] < 0.01 < lines["p"][1]


@pytest.mark.usefixtures("data_files")
def test_numbers_are_those_of_lifelines_on_the_lung_data() -> None:
    """lifelines 0.30.3: CoxPHFitter and proportional_hazard_test, which takes one covariance for all events."""
    frame = columns_of(_LUNG)[["time", "status", "age", "sex", "ph.ecog"]].dropna()
    x = frame[["age", "sex", "ph.ecog"]].to_numpy(float)
    loc = np.array([0.0110667267, -0.5526104084, 0.4637281427])
    event, ones = frame["status"].to_numpy() == 1.0, np.ones(len(frame))
    risk = np.exp((x - x.mean(0)) @ loc)
    course = course_of(frame["time"].to_numpy(float), event, 0.0 * ones, risk, x, ones)
    theirs = {
        "km": [0.028661, 2.432344, 2.164885],
        "rank": [0.118972, 2.289777, 2.115328],
        "identity": [0.025018, 2.556538, 1.683945],
    }
    for transform, values in theirs.items():
        how: Any = transform
        ours = score_tests(course, how, loc)[0]["chi2"][:3]
        np.testing.assert_allclose(ours, values, atol=0.45)


def fitted(frame: pd.DataFrame) -> hierfl.Fit:
    text = "time | event(status) ~ x + z + (1 | site)"
    return hierfl.fit(hierfl.formula(text, "weibull", clients="site"), frame)


@pytest.mark.slow
def test_a_fit_says_which_effect_changes() -> None:
    found = hierfl.proportional_hazards(fitted(made(300, -1.6)))
    assert "The effect of x" in repr(found) and "changes with time" in repr(found)
    assert list(found.frame.index) == ["x", "z", "all"]
    assert found.frame.loc["x", "p"] < 1e-6 and found.frame.loc["x", "change"] < -1.0
    early, late = (
        found.residuals.loc[at, "x"].mean()
        for at in (found.residuals["time"] < 0.5, found.residuals["time"] > 1.5)
    )
    assert abs(early - 0.8) < 0.3 and abs(late - (0.8 - 1.6)) < 0.6
    from matplotlib.figure import Figure

    axes = found.plot("x", Figure().subplots())
    assert axes.get_ylabel() == "log hazard ratio of x" and len(axes.lines) == 4
    with pytest.raises(KeyError, match="the columns are x, z"):
        found.plot("age")


@pytest.mark.slow
def test_a_fit_of_proportional_hazards_is_not_doubted() -> None:
    fit = fitted(made(300, 0.0))
    found = hierfl.proportional_hazards(fit, transform="rank")
    assert found.frame["p"].min() > 0.01
    with pytest.raises(ValueError, match="transform is 'sqrt'"):
        hierfl.proportional_hazards(fit, transform="sqrt")  # type: ignore[arg-type]


REFUSED: dict[str, Callable[[], Any]] = {
    "whose hazards are not proportional": lambda: drawn("time ~ dose + (1 | site)", "lognormal"),
    "has no common columns": lambda: drawn("time ~ 1 + (1 | site)", "weibull"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_checked_is_refused_by_name(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hierfl.proportional_hazards(REFUSED[words]())


def test_g_runs_from_zero_to_one_and_ties_count_once() -> None:
    time = np.array([1.0, 1.0, 2.0, 3.0, 4.0])
    ones = np.ones(5)
    course = course_of(time, ones == 1.0, 0.0 * ones, ones, time[:, None] ** 2, ones)
    assert course.beyond.tolist() == pytest.approx([1.0, 1.0, 0.6, 0.4, 0.2])
    assert course.away[0, 0] == pytest.approx(1.0 - np.mean(time**2))


def test_nothing_is_said_to_change_where_rows_at_risk_are_alike() -> None:
    time, one = np.array([1.0, 2.0, 3.0]), np.ones(3)
    course = course_of(time, one == 1.0, np.zeros(3), one, one[:, None], one)
    lines, _ = score_tests(course, "log", np.zeros(1))
    assert "Nothing can be seen" in verdict(pd.DataFrame(lines, index=["x", "all"]))
