"""A refit with other terms is the fit of the new formula to the same rows."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hierfl
from hierfl import methods
from hierfl.program.recipes import describe
from hierfl.program.sites import recipe_of
from hierfl.runs.choice import choose
from tests.programs import assert_close


def rows(count: int = 90) -> pd.DataFrame:
    g = np.random.default_rng(0)
    found = pd.DataFrame({"x": g.normal(size=count), "age": g.normal(0.0, 0.9, count)})
    found["sex"], found["h"] = g.choice(["f", "m"], count), g.choice(["a", "b", "c"], count)
    found["y"] = found["x"] + found["age"] + g.normal(size=count)
    return found


@cache
def fitted() -> hierfl.Fit:
    made = hierfl.formula("y ~ x + sex + (1 | h)", clients="h", priors={"x": "normal(0, 2)"})
    made = made.on(rows(), levels={"sex": ["m", "f"]}, units={"x": "mg"})
    return hierfl.fit(made, rows(), seed=3)


@pytest.mark.slow
def test_it_is_the_fit_of_the_new_formula_with_the_schema_of_the_old() -> None:
    found = fitted().update("~ . + age", rows())
    formula: Any = found.method.model
    assert formula.text == "y ~ x + sex + (1 | h) + age" and formula.priors.keys() == {"x"}
    assert (
        formula.agreed.columns["sex"].levels == ("m", "f")
        and formula.agreed.columns["x"].unit == "mg"
    )
    assert found.federation.seed == 3 and found.method.name == fitted().method.name == "two_stage"
    again = hierfl.formula("y ~ x + sex + (1 | h) + age", clients="h", priors={"x": "normal(0, 2)"})
    again = again.on(rows(), levels={"sex": ["m", "f"]}, units={"x": "mg"})
    data = again.data(rows())  # of the same method, seed and rows fits are the same
    assert describe(found.method) == describe(choose(again, data).method)
    assert_close(found.federation.data.fields, data.fields, 0.0)


def test_a_named_method_keeps_its_settings() -> None:
    formula = hierfl.formula("y ~ x + (1 | h)", clients="h").on(rows())
    named = hierfl.fit(methods.fedsvi(formula, draws=3), rows(), rounds=2, seed=1)
    found = named.update("~ . - x", rows())
    assert found.method.name == "fedsvi" and found.progress.round == 2 and found.chosen is None
    recipe: Any = recipe_of(found.method)
    assert recipe.options["draws"] == 3 and recipe.options["model"].text == "y ~ (1 | h)"


def test_other_rows_are_refused_and_fewer_are_said() -> None:
    for other in (rows().iloc[3:], rows().assign(x=0.5)):
        with pytest.raises(ValueError, match="other rows than the fit's"):
            fitted().update("~ . + age", other)
    with_gaps = rows().assign(age=rows()["age"].where(rows()["age"] > -1.5))
    with pytest.warns(UserWarning, match="rows lack a value of the new terms and are left out"):
        found = fitted().update("~ . + age", with_gaps, missing="drop")
    assert found.federation.data.num_rows == with_gaps["age"].notna().sum()


def test_what_cannot_be_updated_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="update"):
        fitted().update("~ . + age", rows(), familly="gaussian")
    model = hierfl.models.regression("gaussian")
    data = hierfl.ClientData.from_clients(
        {c: {"x": np.ones((6, 1)), "y": np.arange(6.0)} for c in "ab"}
    )
    with pytest.raises(TypeError, match=r"is for fits of a hierfl\.formula"):
        hierfl.fit(model, data).update("~ . + age", rows())
