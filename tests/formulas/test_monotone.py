"""Monotonic effects: coefficients of one sign, as brms writes them, and read by every answer as other columns are."""

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


@pytest.mark.slow
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


# ------------------------------------------------------------ in products
def test_a_product_has_a_curve_of_each_level_as_in_brms() -> None:
    """b_ms D (zeta_ms1 + ... + zeta_msx) of the level m, beside the effect of the first level's rows."""
    rows = patients().reset_index(drop=True)
    formula = made("y ~ mo(grade) * sex + (1 | site)")
    trace = traced(formula, rows)
    zeta, b = value(trace, "simplex_mo(grade)"), float(value(trace, "b_mo(grade)"))
    more, c = value(trace, "simplex_mo(grade):sex"), value(trace, "b_mo(grade):sex")
    assert more.shape == (2, 2) and c.shape == (2,)
    x = rows["grade"].cat.codes.to_numpy()

    def curve(scale: Any, shares: Any) -> Any:
        return 2 * float(scale) * np.concatenate([[0.0], np.cumsum(shares)])[x]

    step = curve(b, zeta)
    for k, sex in enumerate("mx"):
        step += (rows["sex"] == sex) * (float(value(trace, "sex")[k]) + curve(c[k], more[k]))
    site = rows["site"].str[1:].astype(int).to_numpy()
    eta = value(trace, "site").reshape(-1)[site] + step
    wanted = stats.norm.logpdf(rows["y"], eta, value(trace, "sigma")).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.* has its default prior where .year. is 0")
@pytest.mark.parametrize("text", ["sex * mo(grade)", "year:mo(grade):sex + year", "mo(grade):age"])
def test_the_steps_of_a_curve_follow_each_other(text: str) -> None:
    """Whatever the order of the factors, the columns of a curve add up to its level times the other factors."""
    rows = patients().reset_index(drop=True)
    formula = made(f"y ~ {text} + (1 | site)")
    (term,) = (term for term in formula.layout.common.terms if term.curves)
    names = list(formula.layout.common.columns)
    at = [names.index(column) for column in term.columns]
    columns = formula.data(rows).fields["x"].numpy()[:, at].reshape(len(rows), len(term.curves), 2)
    level = rows["grade"].cat.codes.to_numpy()
    for k, curve in enumerate(term.curves):
        other = np.ones(len(rows))
        for part in curve.split(":"):
            name, _, chosen = part.removesuffix("]").partition("[")
            other = other * (rows[name].astype(str) == chosen if chosen else rows[name])
        np.testing.assert_allclose(columns[:, k].sum(-1), level * other, rtol=1e-5)
        np.testing.assert_allclose(columns[:, k, 1], (level > 1) * other, rtol=1e-5)


def test_names_and_priors_of_a_product() -> None:
    formula = made("y ~ mo(grade) * sex", priors={"mo(grade):sex": "normal(0, 3)"})
    by = ("mo(grade):sex_by", ("sex[m]", "sex[x]"))
    assert formula.dims["b_mo(grade):sex"] == (by,)
    assert formula.dims["simplex_mo(grade):sex"] == (by, ("mo(grade):sex_step", ("mid", "high")))
    known: dict[str, Any] = dict(formula.all_priors)
    assert all(known[f"b_mo(grade):sex[sex[{sex}]]"].scale == 3.0 for sex in "mx")
    scales = []
    for unit in (1.0, 1000.0):
        rows = patients().assign(age=lambda f, unit=unit: unit * f["age"])
        made_of = hierfl.formula("y ~ mo(grade):age", clients="site").on(rows)
        scales.append(dict[str, Any](made_of.all_priors)["b_mo(grade):age[age]"].scale)
    np.testing.assert_allclose(scales[0] / scales[1], 1000.0, rtol=1e-4)


def test_effects_of_a_product_are_those_of_each_level() -> None:
    found = drawn("y ~ mo(grade) * sex + (1 | site)", draws=40)
    shared = {name: of.numpy() for name, of in found.shared.items()}
    steps = 2 * shared["b_mo(grade)"][:, None] * shared["simplex_mo(grade)"]
    more = 2 * shared["b_mo(grade):sex"] * shared["simplex_mo(grade):sex"][:, 0]
    for sex, wanted in (("f", steps), ("m", steps + more)):
        table = comparisons(found, "grade", at={"sex": sex}, scale="link").frame
        table = table.set_index("comparison")["mean"]
        np.testing.assert_allclose(table["iii - i"], wanted.sum(1).mean(), rtol=1e-5)
