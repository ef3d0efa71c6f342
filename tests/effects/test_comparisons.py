"""Comparisons and average predictions are those that are computed by hand from the draws."""

from typing import Any

import numpy as np
import pytest

from hierfl.effects.comparisons import comparisons, predictions
from hierfl.effects.conditional_effects import effects
from tests.effects.made import drawn, frame, of_program, with_shared


def test_differences_of_levels_on_the_link_scale_are_coefficients() -> None:
    found = drawn("died ~ arm + age + (1 | site)", "bernoulli")
    table = comparisons(found, "arm", scale="link").frame.set_index("comparison")
    b, c = found.shared["arm"].T.numpy()
    for name, wanted in {"b - a": b, "c - a": c, "c - b": c - b}.items():
        np.testing.assert_allclose(table["mean"][name], wanted.mean(), rtol=1e-6)
        np.testing.assert_allclose(table["high"][name], np.quantile(wanted, 0.95), rtol=1e-6)
        assert table["p"][name] == (wanted > 0).mean()


def test_true_is_compared_with_false() -> None:
    found = drawn("y ~ old + (1 | site)", "gaussian")
    table = comparisons(found, "old").frame
    assert list(table["comparison"]) == ["True - False"]
    np.testing.assert_allclose(table["mean"], found.shared["old"].mean(), rtol=1e-6)


def test_a_column_of_an_addition_may_be_a_predictor_too() -> None:
    found = drawn("k | trials(n) ~ n + (1 | site)", "binomial")
    table = comparisons(found, "n", scale="link", values=[3, 5]).frame
    np.testing.assert_allclose(table["mean"], 2.0 * found.shared["n"].mean(), rtol=1e-6)


def test_ratios_on_the_link_scale_are_odds_ratios() -> None:
    found = drawn("died ~ sex + (1 | site)", "bernoulli")
    table = comparisons(found, "sex", scale="link", comparison="ratio").frame
    odds = np.exp(found.shared["sex"][:, 0].numpy())
    np.testing.assert_allclose(table["mean"], odds.mean(), rtol=1e-6)
    assert table["comparison"][0] == "m / f" and table["p"][0] == (odds > 1).mean()


def test_response_scale_and_clients_by_hand() -> None:
    found = drawn("count ~ sex + (1 + sex | site)", "poisson")
    k = found.clients.index("east")
    own = found.own["site"][:, k].numpy()
    f, m = np.exp(own[:, 0]), np.exp(own[:, 0] + own[:, 1])
    table = comparisons(found, "sex", client="east").frame
    np.testing.assert_allclose(table["mean"], (m - f).mean(), rtol=1e-6)
    table = comparisons(found, "sex", client="east", comparison="ratio").frame
    np.testing.assert_allclose(table["mean"], (m / f).mean(), rtol=1e-6)


def test_a_client_that_is_named_twice_has_one_row() -> None:
    found = drawn("count ~ sex + (1 + sex | site)", "poisson")
    for ask in (comparisons, effects):
        frame = ask(found, "sex", client=["east", "west", "east"]).frame
        assert list(frame["client"].unique()) == ["east", "west"]
        assert len(frame) == len(ask(found, "sex", client=["east", "west"]).frame)


def test_numbers_are_compared_at_values() -> None:
    found = drawn("y ~ age")
    slope = found.shared["age"].mean().item()
    table = comparisons(found, "age", values=[40, 50, 70]).frame.set_index("comparison")
    assert list(table.index) == ["50 - 40", "70 - 40", "70 - 50"]
    np.testing.assert_allclose(table["mean"], slope * np.array([10, 30, 20]), rtol=1e-5)
    sd = frame()["age"].std(ddof=0)
    np.testing.assert_allclose(comparisons(found, "age").frame["mean"], slope * sd, rtol=1e-5)


def test_levels_of_a_categorical_response_have_a_row_each() -> None:
    found = drawn("grade ~ dose + (1 | site)", "categorical")
    table = comparisons(found, "dose", client="each").frame
    assert len(table) == 3 * 5
    np.testing.assert_allclose(table.groupby("client")["mean"].sum(), 0.0, atol=1e-6)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gaussian", {"comparison": "ratio"}, "responses of gaussian may be negative"),
    ("gaussian", {"comparison": "ratio", "scale": "link"}, "the link of gaussian is 'identity'"),
    ("gaussian", {"comparison": "odds"}, "comparison is 'odds'"),
    ("gaussian", {"values": ["a"]}, "give 2 or more different ones"),
    ("gaussian", {"values": ["a", "d"]}, "'arm' has no level 'd'"),
]


@pytest.mark.parametrize(("family", "options", "words"), WRONG, ids=[w for *_, w in WRONG])
def test_what_is_wrong_is_refused(family: str, options: dict[str, Any], words: str) -> None:
    found = drawn("y ~ arm", family, draws=2)
    with pytest.raises(ValueError, match=words):
        comparisons(found, "arm", **options)


# ------------------------------------------------------------ marginal means
MEANS = [
    ("died ~ sex + age + (1 + sex | site)", "bernoulli"),
    ("count ~ sex + dose + (1 | site) + (1 | site:ward) + (1 | region)", "poisson"),
]


@pytest.mark.parametrize(("text", "family"), MEANS, ids=[text for text, _ in MEANS])
def test_means_are_those_of_the_program_with_the_column_set(text: str, family: str) -> None:
    found = drawn(text, family, draws=6)
    rows = frame()
    both = [of_program(found, rows.assign(sex=level)).mean(1).numpy() for level in "fm"]
    result = predictions(found, "sex")
    np.testing.assert_allclose(result.frame["mean"], [v.mean() for v in both], rtol=1e-5)
    np.testing.assert_allclose(result.frame["low"], np.quantile(both, 0.05, axis=1), rtol=1e-5)
    difference = both[1] - both[0]
    table = comparisons(found, "sex", "rows").frame
    np.testing.assert_allclose(table["mean"], difference.mean(), rtol=1e-4, atol=1e-7)
    assert table["p"][0] == (difference > 0).mean()
    ratio = comparisons(found, "sex", "rows", comparison="ratio").frame
    np.testing.assert_allclose(ratio["mean"], (both[1] / both[0]).mean(), rtol=1e-4)


def test_frames_give_the_same_means_as_the_rows_of_the_fit() -> None:
    found = drawn("died ~ sex + age + (1 + sex | site)", "bernoulli")
    rows = frame()
    for given in (rows, rows.drop(columns="died"), dict(list(rows.groupby("site")))):
        again = predictions(found, "sex", given).frame
        np.testing.assert_allclose(
            again["mean"], predictions(found, "sex").frame["mean"], rtol=1e-6
        )


def test_an_interaction_needs_the_frames() -> None:
    found = drawn("y ~ sex * age + (1 | site)", draws=6)
    with pytest.raises(
        ValueError, match=r"the term 'sex:age' reads 'sex' .* pass the clients' frames"
    ):
        predictions(found, "sex")
    rows = frame()
    table = comparisons(found, "sex", rows).frame
    wanted = of_program(found, rows.assign(sex="m")) - of_program(found, rows.assign(sex="f"))
    np.testing.assert_allclose(table["mean"], wanted.mean(), rtol=1e-4)


def test_other_groups_within_a_client_are_refused() -> None:
    found = drawn("y ~ sex + (1 | site) + (1 | site:ward)")
    fewer = frame().query("ward != 'west 0'")
    with pytest.raises(
        ValueError, match="the rows of client 'west' have other groups of 'site:ward'"
    ):
        predictions(found, "sex", fewer)


def test_rows_count_as_often_as_they_weigh() -> None:
    found = with_shared(drawn("y | weights(n) ~ sex + dose"), sigma=1.0)
    rows = frame()
    mean = of_program(found, rows.assign(sex="f")).mean(0).numpy()
    weight = rows.set_index("site").loc[list(found.clients), "n"].to_numpy()
    wanted = (mean * weight).sum() / weight.sum()
    for given in ("rows", rows, rows.drop(columns="y")):
        again = predictions(found, "sex", given).frame
        np.testing.assert_allclose(again["mean"][0], wanted, rtol=1e-5)
    with pytest.raises(KeyError, match="'n'"):
        predictions(found, "sex", rows.drop(columns=["y", "n"]))
    with pytest.raises(ValueError, match="column 'n' of client 'east' has weights that are"):
        rows["n"] = rows["n"].where((rows["site"] != "east") | (rows.index % 2 == 0))
        predictions(found, "sex", rows.drop(columns="y"))
