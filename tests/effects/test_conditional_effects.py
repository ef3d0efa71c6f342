"""Conditional effects are closed forms of the draws, at typical values; what is wrong is refused by name."""

from typing import Any

import numpy as np
import pytest

from hierfl.effects.conditional_effects import effects
from tests.effects.made import drawn, frame, repeated, with_shared


def test_a_linear_effect_is_the_slope_at_each_draw() -> None:
    found = drawn("y ~ age + sex + (1 | site)")
    rows = frame()
    grid = [40.0, 45.0, 60.0]
    table = effects(found, "age", grid=grid).frame
    age = rows["age"].mean()
    share = (rows["sex"] == "m").mean()
    # other columns are at their reference levels, the average client has no deviation
    start = found.shared["Intercept_centered"] - share * found.shared["sex"][:, 0]
    for value, (_, row) in zip(grid, table.iterrows(), strict=True):
        wanted = (start + found.shared["age"] * (value - age)).numpy()
        np.testing.assert_allclose(row["mean"], wanted.mean(), rtol=1e-6)
        np.testing.assert_allclose(row["low"], np.quantile(wanted, 0.05), rtol=1e-6)
        np.testing.assert_allclose(row["high"], np.quantile(wanted, 0.95), rtol=1e-6)


def test_the_default_grid_reaches_two_sds_from_the_mean() -> None:
    table = effects(drawn("y ~ age"), "age").frame
    rows = frame()
    ends = rows["age"].mean() + 2 * rows["age"].std(ddof=0) * np.array([-1.0, 1.0])
    np.testing.assert_allclose(table["age"].iloc[[0, -1]], ends, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*far outside its knots")
def test_the_default_grid_ends_where_a_spline_does() -> None:
    found = drawn("count ~ bs(dose, df=4, lower_bound=-1.0, upper_bound=9.0)", "poisson", draws=2)
    table = effects(found, "dose").frame
    assert table["dose"].iloc[0] == -1.0 and table["dose"].iloc[-1] < 3.0


def test_a_term_that_is_not_finite_on_the_grid_names_the_mend() -> None:
    found = drawn("count ~ log(time)", "poisson", draws=2)
    words = r"the term 'log\(time\)' is not finite: give other values, by grid="
    with pytest.raises(ValueError, match=words):
        effects(found, "time")
    assert len(effects(found, "time", grid=[0.5, 1.0]).frame) == 2


def test_a_client_has_its_own_slope() -> None:
    found = drawn("y ~ dose + (1 + dose | site)")
    k = found.clients.index("west")
    table = effects(found, "dose", client="west", grid=[0.0, 1.0]).frame
    own = found.own["site"][:, k]
    np.testing.assert_allclose(table["mean"][0], own[:, 0].mean(), rtol=1e-6)
    np.testing.assert_allclose(table["mean"][1], own.sum(-1).mean(), rtol=1e-6)


def test_the_band_of_a_new_client_has_the_spread_between_clients() -> None:
    found = repeated(drawn("y ~ dose + (1 | site)"), 4000)
    found = with_shared(found, Intercept=0.0, sd_site=3.0, dose=2.0)
    table = effects(found, "dose", grid=[0.0, 1.0], client="new").frame
    np.testing.assert_allclose(table["sd"], 3.0, rtol=0.05)
    # one new client a draw: along the grid it is the same one
    np.testing.assert_allclose(np.diff(table["high"]), 2.0, rtol=1e-6)
    alone = effects(found, "dose", grid=[0.0, 1.0]).frame
    assert (table["high"] - table["low"] > alone["high"] - alone["low"] + 5.0).all()


def test_probabilities_of_levels_sum_to_one_and_the_link_has_a_predictor_a_level() -> None:
    for family in ("cumulative", "categorical"):
        found = drawn("grade ~ dose + (1 | site)", family)
        table = effects(found, "dose", client="each").frame
        assert list(table["level"].unique()) == ["i", "ii", "iii"]
        np.testing.assert_allclose(table.groupby(["client", "dose"])["mean"].sum(), 1.0, rtol=1e-6)
    assert list(effects(found, "dose", scale="link").frame["level"].unique()) == ["ii", "iii"]


def test_by_has_levels_or_three_values_and_at_holds_others() -> None:
    found = drawn("y ~ age * sex + dose + arm")
    table = effects(found, "age", by="sex", grid=[50.0]).frame
    assert list(table["sex"]) == ["f", "m"]
    table = effects(found, "sex", by="age", at={"arm": "c"}).frame
    assert len(table) == 2 * 3
    plain = effects(found, "sex", by="age").frame
    coefficient = found.shared["arm"][:, 1].mean().item()
    np.testing.assert_allclose(table["mean"] - plain["mean"], coefficient, rtol=1e-5)
    assert "dose" in effects(found, "age").title and "arm a" in effects(found, "age").title


def test_a_binomial_response_is_shown_for_one_trial() -> None:
    found = drawn("k | trials(n) ~ dose + (1 | site)", "binomial")
    table = effects(found, "dose").frame
    assert table["mean"].between(0.0, 1.0).all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"variable": "height"}, KeyError, "'height' is not a column that the formula's terms read"),
    ({"variable": "y"}, KeyError, "'y' is not a column"),
    ({"variable": "age", "by": "age"}, ValueError, "'age' is the column itself"),
    ({"variable": "age", "at": {"age": 3}}, ValueError, "'age' is to vary"),
    ({"variable": "age", "at": {"sex": "x"}}, ValueError, "'sex' has no level 'x': its levels are f, m"),
    ({"variable": "age", "at": {"weight": 3}}, KeyError, "at has 'weight', which is not a column"),
    ({"variable": "age", "at": {"site": "west"}}, KeyError, "choose a client by client="),
    ({"variable": "age", "at": {"region": "hot"}}, ValueError, "'region' has no group 'hot'"),
    ({"variable": "age", "grid": ["old"]}, TypeError, "'age' is 'old': the column holds numbers"),
    ({"variable": "age", "grid": [float("nan")]}, ValueError, "age is nan"),
    ({"variable": "age", "grid": []}, ValueError, "grid is empty"),
    ({"variable": "age", "client": "center"}, KeyError, "client 'center' was not fitted"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), WRONG, ids=[w for *_, w in WRONG])
def test_what_is_wrong_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    found = drawn("y ~ age + sex + (1 | site) + (1 | region)", draws=2)
    with pytest.raises(error, match=words):
        effects(found, **options)
