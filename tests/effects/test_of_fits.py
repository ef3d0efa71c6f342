"""What a `Fit` of a formula answers, and what it refuses of other models."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hierfl
from hierfl import methods
from tests.effects.made import frame
from tests.programs import federation, fit, regression


@cache
def bernoulli() -> hierfl.Fit:
    rows = frame()
    made = hierfl.formula("died ~ age + sex + (1 + dose | site)", "bernoulli", clients="site")
    made = made.on(rows)
    return fit(methods.fedsvi(made), made.data(rows), rounds=3)


@cache
def other() -> hierfl.Fit:
    return fit(methods.fedsvi(regression), federation(), rounds=2)


def test_a_fit_of_labels_0_and_1_knows_its_formula() -> None:
    """Its program observes labels as floats, by a wrapper around the formula."""
    rows = frame()
    assert bernoulli().predict(rows, draws=5).mean.shape == (len(rows),)
    found = bernoulli().posterior(20, correct=None)
    assert list(found["posterior"]["site_term"].values) == ["Intercept", "dose"]


def test_effects_are_those_of_the_fits_draws() -> None:
    found = bernoulli().effects("age", client="south", grid=[50.0], draws=100, scale="link").frame
    drawn = bernoulli().draws(100)
    k = bernoulli().clients.index("south")
    wanted = drawn.own["site"][:, k, 0] + 50.0 * drawn.shared["age"]
    # dose is at its mean
    wanted = wanted + drawn.own["site"][:, k, 1] * frame()["dose"].mean()
    np.testing.assert_allclose(found["mean"][0], wanted.mean(), rtol=1e-5)


ASKED: list[tuple[str, Callable[[hierfl.Fit], Any]]] = [
    ("effects", lambda fit: fit.effects("x")),
    ("predictions", lambda fit: fit.predictions("x")),
    ("comparisons", lambda fit: fit.comparisons("x")),
    ("hypotheses", lambda fit: fit.hypotheses("x = 0")),
    ("profile", lambda fit: fit.profile()),
    ("survival", lambda fit: fit.survival()),
    ("r2", lambda fit: fit.r2()),
    ("icc", lambda fit: fit.icc()),
    ("imputed", lambda fit: fit.imputed()),
]


def test_each_answer_prints_its_table() -> None:
    found = bernoulli()
    answers: list[tuple[Any, str]] = [
        (found.effects("age", draws=50), "died along age, at sex f"),
        (found.predictions("sex", draws=50), "averaged over clients' rows, sex set in all rows"),
        (found.comparisons("sex", comparison="ratio", scale="link", draws=50), "m / f"),
        (found.comparisons("age", comparison="slope", draws=50), "slopes of died by age"),
        (found.hypotheses("sex[m] > 0", draws=50), "sex[m] > 0"),
        (found.profile(draws=50), "Rank 1 has the lowest effect"),
        (found.r2(draws=50), "marginal"),
        (found.icc(draws=50), "residual"),
    ]
    for answer, words in answers:
        assert words in repr(answer)
        assert "<table" in answer._repr_html_()


@pytest.mark.parametrize(("name", "ask"), ASKED, ids=[name for name, _ in ASKED])
def test_other_models_are_refused_by_name(name: str, ask: Callable[[hierfl.Fit], Any]) -> None:
    words = rf"fit\.{name} is for fits of a hierfl\.formula, and the model is 'regression'"
    with pytest.raises(TypeError, match=words):
        ask(other())


def test_without_rows_what_needs_draws_alone_is_answered(tmp_path: Path) -> None:
    fitted = bernoulli()
    fitted.save(tmp_path)
    loaded = hierfl.load(tmp_path, method=fitted.method)
    here, there = (one.effects("age", client="each", draws=50).frame for one in (fitted, loaded))
    np.testing.assert_allclose(here["mean"], there["mean"], rtol=1e-6)
    assert loaded.icc(draws=50).frame.equals(fitted.icc(draws=50).frame)
    here, there = (one.profile(draws=50).frame for one in (fitted, loaded))
    np.testing.assert_allclose(here["effect"], there["effect"], rtol=1e-6)
    for name in ("r2", "predictions"):
        with pytest.raises(hierfl.RowsNotSaved, match="saved without its clients' rows"):
            getattr(loaded, name)()


def test_a_client_that_came_later_has_its_effects() -> None:
    later = frame().query("site == 'north'").assign(site="center")
    found = bernoulli().personalize(later, rounds=2)
    assert list(found.effects("age", client="each", grid=[50.0]).frame["client"]) == [
        "center",
        "new",
    ]
    with pytest.raises(KeyError, match="client 'south' was not fitted"):
        found.effects("age", client="south")


TEN: Any = "10"
MISUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda f: f.effects("age", scale="odds"), "scale is 'odds'"),
    (lambda f: f.effects("age", draws=5), "draws is 5: a 90% interval needs 20 or more"),
    (lambda f: f.effects("age", draws=100, prob=0.99), "draws is 100: a 99% interval needs 200"),
    (lambda f: f.effects(["age", "sex"]), "a column is a list: give the name of one"),
    (lambda f: f.effects(frame()), "a column is a DataFrame"),
    (lambda f: f.predictions(frame()), "a column is a DataFrame"),
    (lambda f: f.effects("age", by=["sex"]), "a column is a list"),
    (lambda f: f.effects("age", at="sex"), "at is 'sex': give a dict"),
    (lambda f: f.effects("age", grid=50), r"grid is 50: give a list of values, \[50\]"),
    (lambda f: f.comparisons({"age": 10}), "a column is a dict"),
    (lambda f: f.comparisons("sex", values="m"), r"values is 'm': give a list of values, \['m'\]"),
    (lambda f: f.predictions("age", values=50), r"values is 50: give a list"),
    (lambda f: f.predictions(by=["site", "sex"]), "by is .*: give the name of one column"),
    (lambda f: f.hypotheses(3), "a hypothesis is 3: give a text"),
    (lambda f: f.hypotheses("age^2 > 0"), r"from '\^' on: write \*\* for a power"),
    (lambda f: f.hypotheses("age >= 0"), "write one sign of =, > and <"),
    (lambda f: f.hypotheses("age"), "has none of the signs = > <: write one"),
    (lambda f: f.hypotheses("sexm > 0"), r"did you mean 'sex\[m\]'"),
    (lambda f: f.hypotheses("site[north] > 0"), r"did you mean 'site\[north, Intercept\]'"),
    (lambda f: hierfl.diagnostics.sensitivity(f.method.model), "fit is a Formula: pass"),
    (lambda f: hierfl.describe([frame()]), "rows is a list: give a frame"),
    (lambda f: hierfl.describe(frame()[:0]), "the frame has no rows"),
    (lambda f: hierfl.simulate(f, frame(), clients=2, rows=TEN), "rows is '10': it must be"),
]


@pytest.mark.parametrize(("ask", "words"), MISUSED, ids=[words for _, words in MISUSED])
def test_misuse_is_refused_with_what_to_write(ask: Callable[[Any], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ask(bernoulli())


# ------------------------------------------------------------ draws, and other probabilities
DRAWN: list[tuple[str, Callable[[hierfl.Fit], Any], tuple[str, ...]]] = [
    ("effects", lambda f: f.effects("age", by="sex", client="each", prob=0.5), ("client", "sex", "age")),
    ("comparisons", lambda f: f.comparisons("sex", client="new", prob=0.5), ("client", "comparison")),
    ("predictions", lambda f: f.predictions("sex", prob=0.5), ("sex",)),
    ("by", lambda f: f.predictions("sex", by="site", prob=0.5), ("site", "sex")),
    ("slopes", lambda f: f.comparisons("age", comparison="slope", prob=0.5), ("client", "comparison")),
    ("hypotheses", lambda f: f.hypotheses("age = 0", prob=0.5), ("hypothesis",)),
    ("r2", lambda f: f.r2(prob=0.5), ("share",)),
    ("icc", lambda f: f.icc(prob=0.5), ("group",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ask", "dims"), DRAWN, ids=[name for name, *_ in DRAWN])
def test_the_table_is_that_of_the_draws(
    name: str, ask: Callable[[hierfl.Fit], Any], dims: tuple[str, ...]
) -> None:
    found = ask(bernoulli())
    assert found.draws.dims == ("chain", "draw", *dims)
    flat = found.draws.to_numpy().reshape(1000, -1)
    np.testing.assert_allclose(found.frame["mean"], flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.frame["low"], np.quantile(flat, 0.25, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.frame["high"], np.quantile(flat, 0.75, axis=0), rtol=1e-12)
    assert "50% interval" in repr(found)
    for dim in dims:  # the labels of rows are those of the draws
        labels = found.frame.index if dim in ("share", "group") else found.frame[dim]
        each = np.unique(np.array(labels), return_counts=True)[1]
        assert (each == len(labels) // len(found.draws[dim])).all()


def test_a_profile_has_draws_of_effects_ranks_and_ratios() -> None:
    found = bernoulli().profile(prob=0.95, draws=200)
    assert set(found.draws) == {"effect", "rank", "ratio"}
    for name, column in (("effect", "effect"), ("rank", "rank"), ("ratio", "ratio")):
        wanted = found.draws[name].mean(("chain", "draw"))
        np.testing.assert_allclose(found.frame[column], wanted, rtol=1e-12)
    low, high = found.draws["effect"].quantile([0.025, 0.975], ("chain", "draw")).to_numpy()
    np.testing.assert_allclose(found.frame["effect_low"], low, rtol=1e-9)
    np.testing.assert_allclose(found.frame["effect_high"], high, rtol=1e-9)
    assert found.title.endswith("95% intervals")
    labels = found.plot_ranks().get_ylabel()
    assert labels == "client (95% of its rank)"


def test_a_summary_has_intervals_of_95_percent() -> None:
    found = bernoulli().summary(prob=0.95, draws=200)
    row = found.frame.set_index("site").loc["age"]
    age = bernoulli().draws(200).shared["age"].double().numpy()
    np.testing.assert_allclose(row[["low", "high"]].astype(float), np.quantile(age, [0.025, 0.975]))
    assert list(found.tables[0][1].columns[-2:]) == ["2.5%", "97.5%"]
    with pytest.raises(ValueError, match="draws is 30: a 95% interval needs an integer of 40"):
        bernoulli().summary(prob=0.95, draws=30)


def test_columns_called_as_those_of_the_answer_are_refused() -> None:
    rows = frame().rename(columns={"dose": "level"})
    made = hierfl.formula("y ~ level + (1 | site)", clients="site").on(rows)
    found = fit(methods.fedsvi(made), made.data(rows), rounds=1)
    with pytest.raises(ValueError, match="'level' is the name of a column or a dimension"):
        found.effects("level")
