"""What a `Fit` of a formula answers, and what it refuses of other models."""

from __future__ import annotations

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
    ("contrasts", lambda fit: fit.contrasts("x")),
    ("marginal_means", lambda fit: fit.marginal_means("x")),
    ("profile", lambda fit: fit.profile()),
    ("survival", lambda fit: fit.survival()),
    ("r2", lambda fit: fit.r2()),
    ("icc", lambda fit: fit.icc()),
]


def test_each_answer_prints_its_table() -> None:
    found = bernoulli()
    answers: list[tuple[Any, str]] = [
        (found.effects("age", draws=50), "died along age, at sex f"),
        (found.contrasts("sex", kind="ratio", scale="link", draws=50), "m / f"),
        (found.marginal_means("sex", draws=50), "averaged over all clients' rows"),
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
    for ask in (loaded.r2, loaded.profile, lambda: loaded.marginal_means("sex")):
        with pytest.raises(hierfl.RowsNotSaved, match="saved without its clients' rows"):
            ask()


def test_a_client_that_came_later_has_its_effects() -> None:
    later = frame().query("site == 'north'").assign(site="center")
    found = bernoulli().personalize(later, rounds=2)
    assert list(found.effects("age", client="each", grid=[50.0]).frame["client"]) == [
        "center",
        "new",
    ]
    with pytest.raises(KeyError, match="client 'south' was not fitted"):
        found.effects("age", client="south")


def test_a_scale_and_too_few_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is 'odds'"):
        bernoulli().effects("age", scale="odds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws is 5: a 90 % interval needs 20 or more"):
        bernoulli().effects("age", draws=5)
