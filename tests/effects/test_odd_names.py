"""Columns of any name, in backquotes, in every answer of a formula: the answers are those of plain names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl.effects.comparisons import comparisons, predictions
from hierfl.effects.conditional_effects import effects, survival
from hierfl.effects.drawn import CoefficientDraws
from hierfl.effects.hypotheses import hypotheses
from hierfl.effects.profile import profile
from hierfl.effects.variance import icc
from tests.effects.made import frame, of_formula

NAMES = ["tics(n)", "x[1]:sex", "s(q, by=1) ~ c; d"]
Answer = Callable[[CoefficientDraws, pd.DataFrame, str, str], Any]
# Formula, of which `q` is a column of numbers and `k` one of categories, its family, and an answer.
PLACES: dict[str, tuple[str, str, Answer]] = {
    "effects along a column": (
        "y ~ `q` * `k` + (1 + `q` | site)", "gaussian",
        lambda draws, rows, q, k: effects(draws, q, by=k, at={}, client="each"),
    ),
    "effects at a value": (
        "y ~ age + `q` + (1 | site)", "gaussian",
        lambda draws, rows, q, k: effects(draws, "age", at={q: 1.0}),
    ),
    "comparisons of levels": (
        "died ~ `k` + scale(`q`) + (1 | site)", "bernoulli",
        lambda draws, rows, q, k: comparisons(draws, k, rows, by="site"),
    ),
    "slopes by a column": (
        "y ~ s(`q`, by=`k`, k=4) + (1 | site)", "gaussian",
        lambda draws, rows, q, k: comparisons(draws, q, rows, comparison="slope", by=k),
    ),
    "predictions of the rows": (
        "y ~ poly(`q`, 2) + (1 | site)", "gaussian",
        lambda draws, rows, q, k: predictions(draws, q, values=[0.0, 1.0]),
    ),
    "a hypothesis": (
        "y ~ `q` + (1 | site)", "gaussian",
        lambda draws, rows, q, k: hypotheses(draws, f"2 * `{q}` > 0.1"),
    ),
    "a profile": (
        "y ~ `q` + (1 + `q` | site)", "gaussian",
        lambda draws, rows, q, k: profile(draws, q),
    ),
    "survival by levels": (
        "time | event(seen) ~ `k` + (1 | site)", "weibull",
        lambda draws, rows, q, k: survival(draws, by=k, client=None),
    ),
    "shares of groups": (
        "y ~ age + (1 | `k`) + (1 | site)", "gaussian",
        lambda draws, rows, q, k: icc(draws),
    ),
    "a response": (
        "`q` ~ age + (1 | site)", "gaussian",
        lambda draws, rows, q, k: predictions(draws, "age", rows, values=[50.0]),
    ),
    "a response of several columns": (
        "cbind(`q`, most, left) ~ dose + (1 | site)", "dirichlet",
        lambda draws, rows, q, k: predictions(draws, "dose", rows, values=[0.0]),
    ),
    "an addition": (
        "y | weights(`q`) ~ age + (1 | site)", "gaussian",
        lambda draws, rows, q, k: predictions(draws, "age", rows, by="site"),
    ),
}  # fmt: skip


def answered(place: str, name: str) -> np.ndarray:
    text, family, ask = PLACES[place]
    q, k = name, f"{name} too"
    rows = frame()
    values = rows["rest"] if "cbind" in text else rows["n"] / 4.0
    rows = rows.assign(**{q: values, k: rows["arm"]})
    made = hierfl.formula(
        text.replace("`q`", f"`{q}`").replace("`k`", f"`{k}`"), family, clients="site"
    )
    draws = of_formula(made.on(rows), rows, draws=10)
    numbers: np.ndarray = ask(draws, rows, q, k).frame.select_dtypes("number").to_numpy()
    return numbers


@pytest.mark.parametrize("place", PLACES)
def test_a_column_of_any_name_has_the_answers_of_a_plain_one(place: str) -> None:
    """Each name at every third place."""
    name, plain = NAMES[[*PLACES].index(place) % len(NAMES)], answered(place, "q")
    assert np.isfinite(plain).any()
    np.testing.assert_allclose(answered(place, name), plain, rtol=1e-6)


def test_a_formula_of_odd_names_is_the_same_after_its_text_was_read_again() -> None:
    for name in [*NAMES, "1", "it's", "None", "two  blanks", "mi(x)"]:
        text = f"y ~ `{name}` + scale(`{name}`) * sex + (1 + `{name}` | site); sigma ~ `{name}`"
        made = hierfl.formula(text, clients="site")
        tree = made.declared.parts
        again = hierfl.formula("; ".join(tree.texts), clients="site").declared.parts
        assert again == tree and str(again.common) == str(tree.common)
