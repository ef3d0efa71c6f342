"""Monotonic effects: coefficients of one sign, as brms writes them, and read by every answer as other columns are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import hierfl
from hierfl.effects.comparisons import comparisons
from tests.effects.made import drawn, frame
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value

TEXT = "y ~ mo(grade) + age + (1 | site)"


def made(text: str = TEXT, **options: Any) -> hierfl.Formula:
    return hierfl.formula(text, clients="site", **options).on(patients())


def test_the_predictor_is_that_of_brms() -> None:
    """b D (zeta_1 + ... + zeta_x), Buerkner and Charpentier 2020, equation 1."""
    rows, formula = patients(), made()
    trace = traced(formula, rows)
    zeta, b = value(trace, "simplex_mo(grade)"), float(value(trace, "b_mo(grade)"))
    np.testing.assert_allclose(zeta.sum(), 1.0, rtol=1e-6)
    x = rows["grade"].cat.codes.to_numpy()
    step = 2 * b * np.concatenate([[0.0], np.cumsum(zeta)])[x]
    site = rows["site"].str[1:].astype(int).to_numpy()
    eta = value(trace, "site").reshape(-1)[site] + step + value(trace, "age") * rows["age"]
    wanted = stats.norm.logpdf(rows["y"], eta, value(trace, "sigma")).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-6)
    np.testing.assert_allclose(value(trace, "mo(grade)"), 2 * b * zeta, rtol=1e-6)


def test_priors_and_names() -> None:
    known: dict[str, Any] = dict(made(priors={"b": "normal(0, 1)"}).all_priors)
    assert known["b_mo(grade)"].scale == 1.0 and known["age"].scale == 1.0
    assert known["simplex_mo(grade)"].concentration.tolist() == [1.0, 1.0]
    own = made(priors={"mo(grade)": "normal(0, 3)"}).all_priors["b_mo(grade)"]
    assert own.scale == 3.0  # type: ignore[union-attr]
    assert made().dims["mo(grade)"] == (("mo(grade)_dim", ("mid", "high")),)


def test_effects_rise_from_level_to_level() -> None:
    found = drawn(
        "count ~ mo(grade) + (1 | site); shape ~ mo(grade)", "negative_binomial", draws=40
    )
    steps = 2 * (found.shared["b_mo(grade)"][:, None] * found.shared["simplex_mo(grade)"]).numpy()
    assert (np.sign(steps) == np.sign(found.shared["b_mo(grade)"].numpy())[:, None]).all()
    table = comparisons(found, "grade", scale="link").frame.set_index("comparison")["mean"]
    wanted = {"ii - i": steps[:, 0], "iii - i": steps.sum(1), "iii - ii": steps[:, 1]}
    for name, draws in wanted.items():
        np.testing.assert_allclose(table[name], draws.mean(), rtol=1e-5)
    assert set(frame()["grade"].cat.categories) == {"i", "ii", "iii"}


def test_numbers_are_levels_in_their_order() -> None:
    rows = patients().assign(dose=lambda f: (f["dose"] * 2).astype(int).clip(upper=10))
    formula = hierfl.formula("y ~ mo(dose)", clients="site").on(rows)
    levels = formula.agreed.columns["dose"].levels
    assert list(levels) == [str(n) for n in sorted(set(rows["dose"]))]
    x = formula.data(rows).fields["x"].numpy().sum(1)
    wanted = rows["dose"].map({n: i for i, n in enumerate(sorted(set(rows["dose"])))})
    np.testing.assert_allclose(x, wanted)


def test_a_fit_finds_the_steps() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, 600)
    y = np.array([0.0, 1.0, 1.2, 3.0])[x] + rng.normal(0.0, 0.5, 600)
    rows = pd.DataFrame({"h": np.repeat(list("abcd"), 150), "x": x, "y": y})
    fit = hierfl.fit(hierfl.formula("y ~ mo(x)", clients="h"), rows, seed=0, progress=False)
    steps = fit.draws(400).shared["mo(x)"].double()
    means = pd.Series(y).groupby(x).mean().to_numpy()
    assert torch.allclose(steps.mean(0), torch.as_tensor(np.diff(means)), atol=0.05)
    headings = dict(fit.summary(draws=50).tables)
    assert [n for n in next(iter(headings.values())).index if n.startswith("b_")] == ["b_mo(x)"]


WRONG = {
    "y ~ mo(grade):age": "stands in a product",
    "y ~ mo(grade) * sex": "stands in a product",
    "y ~ scale(mo(grade))": "codes no column|stands in a product or a function",
    "y ~ mo(log(age))": "codes no column",
    "y ~ age + (mo(grade) | site)": "may stand among the common terms only",
    "y ~ mo(sex)": "have no order",
    "y ~ mo(died)": "has 2 levels, of which no order is needed",
    "y ~ mo(grade, 2)": "an argument too many",
    "y ~ mo(age) + age": "codes a column that the formula reads as a number elsewhere",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_it_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=WRONG[text]):
        made(text).program()
