"""Federations drawn before there are data have the moments of the prior, and intervals the widths of theory."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import precision, simulate

COLUMNS: dict[str, Any] = {"x": lambda g, n: g.normal(0.0, 1.0, n), "arm": ["control", "treated"]}


def formula(text: str = "y ~ x + arm + (1 | site)", family: str = "gaussian") -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site")


def test_the_frames_hold_what_was_asked_for() -> None:
    (one, two) = simulate(formula(), COLUMNS, clients=3, rows=[5, 7, 9], count=2, seed=1)
    assert [len(frame) for frame in one.frames.values()] == [5, 7, 9]
    assert list(one.frames) == ["client 1", "client 2", "client 3"]
    frame = one.frames["client 2"]
    assert set(frame["arm"]) <= {"control", "treated"}
    assert set(frame) == {"y", "x", "arm", "site"}
    other = two.frames["client 2"]
    assert frame["x"].equals(other["x"]) and not frame["y"].equals(other["y"])
    (again,) = simulate(formula(), COLUMNS, clients=3, rows=[5, 7, 9], seed=1)
    pd.testing.assert_frame_equal(frame, again.frames["client 2"])


@pytest.mark.slow
def test_responses_have_the_variance_of_the_prior() -> None:
    """Var y = Var(Intercept) + E[sd^2] + E[sigma^2], all three 1 by these priors."""
    priors = {
        "Intercept": dist.Normal(0.0, 1.0),
        "sd_site": dist.HalfNormal(1.0),
        "sigma": dist.HalfNormal(1.0),
    }
    made = hierfl.formula("y ~ 1 + (1 | site)", clients="site", priors=priors)
    found = simulate(made, {}, clients=4, rows=2, count=700)
    first = np.array([one.frames["client 1"]["y"].iloc[0] for one in found])
    assert first.var() == pytest.approx(3.0, rel=0.2)
    levels = np.array([one.frames["client 1"]["y"].mean() for one in found])
    others = np.array([one.frames["client 2"]["y"].mean() for one in found])
    assert np.cov(levels, others)[0, 1] == pytest.approx(1.0, abs=0.25)  # the intercept's alone


def test_yes_and_no_and_counts() -> None:
    for family, allowed in (("bernoulli", {0, 1}), ("poisson", None)):
        (one,) = simulate(formula(family=family), COLUMNS, clients=2, rows=30)
        values = set(pd.concat(one.frames.values())["y"].tolist())
        assert values <= allowed if allowed else all(v >= 0 and v == int(v) for v in values)


@cache
def pilot() -> hierfl.Fit:
    g = np.random.default_rng(0)
    site = np.repeat(np.arange(60), 40)
    y = 1.0 + 0.5 * g.standard_normal(60)[site] + 2.0 * g.standard_normal(len(site))
    frame = pd.DataFrame({"site": [f"s{k}" for k in site], "y": y})
    return hierfl.fit(hierfl.formula("y ~ 1 + (1 | site)", clients="site"), frame)


def test_from_a_fit_global_values_are_its_posterior_and_clients_are_new() -> None:
    found = simulate(pilot(), {}, clients=5, rows=4, count=80)
    drawn = torch.stack([one.truth["sigma"] for one in found]).double()
    posterior = pilot().draws(1000).shared["sigma"].double()
    assert abs(float(drawn.mean() - posterior.mean())) < 0.3 * float(posterior.std())
    y = np.concatenate([frame["y"] for one in found for frame in one.frames.values()])
    assert y.std() == pytest.approx((0.5**2 + 2.0**2) ** 0.5, rel=0.1)


@pytest.mark.slow
def test_widths_are_those_of_theory() -> None:
    """Of a mean: 2 * 1.96 sqrt((tau^2 + sigma^2 / n) / N), where both are known well."""
    found = precision(
        pilot(), {}, "Intercept", clients=(15, 60), rows=(10, 40), replications=4, progress=False
    )
    assert list(found.table.index) == [(15, 10), (15, 40), (60, 10), (60, 40)]
    for (clients, rows), width in found.table["width"].items():
        expected = 2 * 1.96 * ((0.5**2 + 2.0**2 / rows) / clients) ** 0.5
        assert width == pytest.approx(expected, rel=0.25)
    assert (found.table["excludes_zero"] == 1.0).loc[60].all()


@pytest.mark.slow
def test_precision_is_the_same_by_one_process_and_by_two() -> None:
    how: dict[str, Any] = {"clients": (4,), "rows": (6,), "replications": 2, "progress": False}
    one, two = (precision(pilot(), {}, "sigma", workers=w, **how).table for w in (1, 2))
    pd.testing.assert_frame_equal(one, two)


def test_refusals() -> None:
    with pytest.raises(KeyError, match="columns lacks 'arm', which the formula reads"):
        simulate(formula(), {"x": [0.0, 1.0]})
    with pytest.raises(ValueError, match="rows has 2 numbers, and there are 3 clients"):
        simulate(formula(), COLUMNS, clients=3, rows=[4, 4])
    with pytest.raises(TypeError, match=r"give a hierfl\.formula"):
        simulate(lambda batch: None, COLUMNS)  # type: ignore[arg-type]
    for text, family, name in (
        ("y | event(died) ~ x + (1 | site)", "weibull", "event"),
        ("y | cens(c) ~ x + (1 | site)", "weibull", "cens"),
        ("y | weights(w) ~ x + (1 | site)", "gaussian", "weights"),
    ):
        with pytest.raises(ValueError, match=rf"the response has {name}\(\), and a drawn response"):
            simulate(formula(text, family), {**COLUMNS, "died": [1], "c": [0], "w": [1.0]})
    with pytest.raises(KeyError, match="there is no parameter 'b'"):
        precision(pilot(), {}, "b", clients=(3,), rows=(5,), replications=1, workers=1)
    with pytest.raises(ValueError, match="prob is 95"):
        precision(pilot(), {}, "sigma", prob=95.0)
