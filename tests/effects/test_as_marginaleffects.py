"""Averages, comparisons and slopes are those of marginaleffects 0.6.0 for Python, of a pooled logistic regression.

Its numbers are of `statsmodels.formula.api.logit("died ~ age * sex + arm")` (statsmodels 0.15.0) on `people()`.
The coefficients here are the estimates, without spread.
"""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl.effects.comparisons import comparisons, predictions
from hierfl.effects.drawn import CoefficientDraws
from hierfl.effects.hypotheses import hypotheses, parameters
from tests.effects.made import drawn

CLIENTS = ("north", "south", "east", "west")
# statsmodels' estimates
ESTIMATES = {
    "sex[m]": -1.568541061804581,
    "arm[b]": -0.6859611319753034,
    "arm[c]": -0.695553403740554,
    "age": 0.0801911489543751,
    "age:sex[m]": 0.03940429124696603,
}
INTERCEPT = -3.3659499157175614


def people() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    parts = []
    for k, name in enumerate(CLIENTS):
        n = 24 + 6 * k
        part = pd.DataFrame({"site": name, "age": rng.normal(50.0 + 2.0 * k, 10.0, n)})
        part["sex"] = [("f", "m")[i % 2] for i in range(n)]
        part["arm"] = [("a", "b", "c")[i // 8 % 3] for i in range(n)]
        eta = (part["age"] - 50) / 8 + 0.7 * (part["sex"] == "m")
        part["died"] = rng.binomial(1, 1 / (1 + np.exp(-eta)))
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


@cache
def estimated() -> CoefficientDraws:
    rows = people()
    assert abs(rows["age"].sum() - 7079.932356132127) < 1e-9
    made = hierfl.formula("died ~ age * sex + arm", "bernoulli", clients="site").on(rows)
    center = INTERCEPT + sum(
        value * made.agreed.design[name].mean for name, value in ESTIMATES.items()
    )
    shared = {"Intercept_centered": torch.tensor(center).double().expand(20)}
    for term in made.layout.common.terms:
        values = torch.tensor([ESTIMATES[name] for name in term.columns]).double()
        shared[term.name] = (values if term.coords else values[0]).expand(
            20, *[len(values)] * bool(term.coords)
        )
    data = made.data(rows)
    return CoefficientDraws(made, data.names, data, shared, {})


ASKED: list[tuple[Any, dict[str, Any], list[float]]] = [
    (predictions, {}, [0.6515151515]),
    (predictions, {"by": "arm"}, [0.7592592593, 0.5909090909, 0.5588235294]),
    (predictions, {"by": "site"}, [0.6882598695, 0.5635441065, 0.6475863047, 0.6730951667]),
    (predictions, {"variable": "sex"}, [0.6091375585, 0.6916138740]),
    (comparisons, {"variable": "sex"}, [0.0824763155]),
    (comparisons, {"variable": "sex", "by": "arm"}, [0.0719467716, 0.0892837295, 0.0903901143]),
    (comparisons, {"variable": "sex", "comparison": "ratio"}, [1.1353985063]),
    (comparisons, {"variable": "age", "values": 10}, [0.1746439350]),
    (comparisons, {"variable": "age", "values": [40, 60]}, [0.4288283719]),
    (comparisons, {"variable": "arm"}, [-0.1251051973, -0.1269787627]),
    (comparisons, {"variable": "age", "comparison": "slope"}, [0.0176093832]),
    (comparisons, {"variable": "age", "comparison": "slope", "by": "sex"}, [0.0164570082, 0.0187617583]),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "options", "wanted"), ASKED)
def test_averages_over_rows(ask: Any, options: dict[str, Any], wanted: list[float]) -> None:
    found = ask(estimated(), newdata=people(), **options)
    np.testing.assert_allclose(found.frame["mean"][: len(wanted)], wanted, rtol=2e-6)
    np.testing.assert_allclose(found.frame["sd"], 0.0, atol=1e-12)


@pytest.mark.parametrize("labeled", [True, False])
def test_averages_of_counts_with_an_offset_and_weights(labeled: bool) -> None:
    """Those of `predict` of a Poisson regression, exp(X b + offset), weighted as marginaleffects' `wts`."""
    rng = np.random.default_rng(1)
    rows = people()
    rows["count"], rows["w"] = rng.poisson(2.0, len(rows)), rng.integers(1, 5, len(rows)) * 1.0
    rows["at_risk"] = rng.uniform(0.5, 3.0, len(rows))
    text = "count | weights(w) ~ age + sex + offset(log(at_risk))"
    made = hierfl.formula(text, "poisson", clients="site").on(rows)
    start, b = -1.0, {"age": 0.02, "sex[m]": 0.4}
    center = start + sum(value * made.agreed.design[name].mean for name, value in b.items())
    one = torch.ones(20, dtype=torch.float64)
    shared = {"Intercept_centered": center * one, "age": b["age"] * one}
    shared["sex"] = b["sex[m]"] * one[:, None]
    data = made.data(rows)
    found = CoefficientDraws(made, data.names, data, shared, {})

    def mean(age: float = 0.0, male: Any = rows["sex"] == "m") -> float:
        eta = start + b["age"] * (rows["age"] + age) + b["sex[m]"] * male
        return float(np.average(rows["at_risk"] * np.exp(eta), weights=rows["w"]))

    given = rows if labeled else rows.drop(columns="count")
    for ask, options, wanted in (
        (predictions, {}, mean()),
        (comparisons, {"variable": "sex"}, mean(male=1.0) - mean(male=0.0)),
        (comparisons, {"variable": "sex", "comparison": "ratio"}, np.exp(0.4)),
        (comparisons, {"variable": "age", "values": 10}, mean(5.0) - mean(-5.0)),
        (comparisons, {"variable": "age", "comparison": "slope"}, b["age"] * mean()),
    ):
        answer: Any = ask
        table = answer(found, newdata=given, **options).frame
        np.testing.assert_allclose(table["mean"], wanted, rtol=2e-6)
    with pytest.raises(TypeError, match="client is 3: give a name"):
        comparisons(found, "sex", client=3)  # type: ignore[arg-type]


TYPICAL: list[tuple[Any, dict[str, Any], float]] = [
    (comparisons, {"variable": "age", "comparison": "slope"}, 0.0162324774),
    (comparisons, {"variable": "sex"}, 0.0964664227),
    (comparisons, {"variable": "age", "values": 10}, 0.1613865750),
]


@pytest.mark.parametrize(("ask", "options", "wanted"), TYPICAL)
def test_a_typical_row(ask: Any, options: dict[str, Any], wanted: float) -> None:
    """Their row has the mean age, sex f and arm a."""
    np.testing.assert_allclose(ask(estimated(), **options).frame["mean"], wanted, rtol=2e-6)


def test_a_slope_elsewhere_is_the_derivative_of_the_logistic() -> None:
    table = comparisons(estimated(), "age", comparison="slope", at={"age": 40.0, "sex": "m"}).frame
    slope = ESTIMATES["age"] + ESTIMATES["age:sex[m]"]
    p = 1 / (1 + np.exp(-(INTERCEPT + ESTIMATES["sex[m]"] + 40.0 * slope)))
    np.testing.assert_allclose(table["mean"], p * (1 - p) * slope, rtol=2e-6)
    link = comparisons(estimated(), "age", comparison="slope", scale="link").frame
    np.testing.assert_allclose(link["mean"], ESTIMATES["age"], rtol=1e-6)


def test_rows_without_frames_are_those_of_the_fit() -> None:
    found = comparisons(estimated(), "arm", "rows")
    np.testing.assert_allclose(found.frame["mean"][0], -0.1251051973, rtol=2e-6)
    by_site = predictions(estimated(), by="site").draws
    assert by_site.dims == ("chain", "draw", "site")
    np.testing.assert_allclose(by_site.sel(site="north").mean(), 0.5635441065, rtol=2e-6)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (comparisons, {"variable": "sex", "comparison": "slope"}, "'sex' is a category, which has no slope"),
    (
        comparisons, {"variable": "age", "comparison": "slope", "newdata": "rows"},
        "stores no rows of 'age' that could be shifted"
    ),
    (comparisons, {"variable": "age", "comparison": "slope", "by": "arm"}, "by is for averages over rows"),
    (
        comparisons, {"variable": "age", "comparison": "slope", "newdata": "all"},
        "newdata is 'all': it must be one of 'rows'"
    ),
    (comparisons, {"variable": "age", "comparison": "slope", "values": 10}, "at= says where a slope is taken"),
    (comparisons, {"variable": "sex", "values": 2}, "values is 2: a step is a finite number"),
    (comparisons, {"variable": "age", "values": 0}, "values is 0: a step is a finite number"),
    (comparisons, {"variable": "arm", "newdata": "rows", "client": "east"}, "at and client are for"),
    (comparisons, {"variable": "arm", "newdata": "rows", "by": "sex"}, "by is 'sex', and the fit"),
    (predictions, {"values": ["f"]}, "values needs variable"),
    (predictions, {"variable": "arm", "by": "arm"}, "by is 'arm', which is set in all rows"),
    (predictions, {"prob": 95}, "prob is 95: give the probability"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "options", "words"), REFUSED)
def test_what_is_wrong_is_refused(ask: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(estimated(), **options)


# ------------------------------------------------------------ hypotheses
def test_hypotheses_are_read_to_their_last_sign() -> None:
    b, c, age = ESTIMATES["arm[b]"], ESTIMATES["arm[c]"], ESTIMATES["age"]
    asked = {
        "arm[b] = arm[c]": b - c,
        "exp(arm[b]) < 2 * age": np.exp(b) - 2 * age,
        "`age:sex[m]` / age - 1.5e-1 > -(arm[b] + 2) ** 2": ESTIMATES["age:sex[m]"] / age
        - 0.15
        + (b + 2) ** 2,
        "- 2 ** 2 = -age - 1 - 1": -4 + age + 2,
    }
    found = hypotheses(estimated(), list(asked), prob=0.5)
    np.testing.assert_allclose(found.frame["mean"], list(asked.values()), rtol=1e-6)
    assert list(found.frame["p"]) == [1.0, 0.0, 1.0, 0.0]
    assert list(found.draws["hypothesis"].values) == list(asked)


UNREAD = {
    "arm[b]": "has none of the signs = > <",
    "arm[b] = 0 = age": "cannot be read from '=' on",
    "arm[d] = 0": r"'arm\[d\]' is not a parameter of the fit: .*the parameters are Intercept",
    "ages = 0": "'ages' is not a parameter",
    "age age = 0": "cannot be read from 'age' on",
    "(age = 0": "cannot be read from '=' on",
    "age + = 0": "cannot be read from '=' on",
    "`age = 0": "close the backtick",
    "age if age else 1 = 0": "cannot be read",
    "True = 0": "'True' is not a parameter",
    "age) + (age = 0": "cannot be read",
    "age, age = 0": "cannot be read",
    "log(arm[b]) = 0": "is not finite at some draws",
}


@pytest.mark.parametrize("text", UNREAD)
def test_a_hypothesis_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=UNREAD[text]):
        hypotheses(estimated(), text)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("y ~ age:sex + scale(dose) + (1 + age | site)", "gaussian"),
        ("y ~ s(age, k=5, by=sex) + log(age) + (1 | site:ward)", "gaussian"),
        ("arm ~ `age` + (1 | site)", "categorical"),
    ],
)
def test_every_parameter_stands_in_a_hypothesis_by_its_name(text: str, family: str) -> None:
    draws = drawn(text, family)
    for name, values in parameters(draws).items():
        quoted = f"`{name}`" if name.startswith("log(") else name  # else it is the function
        mean = hypotheses(draws, f"{quoted} = 0").frame["mean"][0]
        assert mean == pytest.approx(float(values.mean())), name
