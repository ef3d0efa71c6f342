"""The predictor of rows is that of the program, for every term and family; new groups have the right moments."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hierfl.effects.predictor import asked, mean_response, parameters_at, predictor
from hierfl.effects.predictor_rows import evaluated, predictors, rows_of_client, typical
from hierfl.formulas.columns import prepared
from hierfl.models import families
from tests.effects.made import CLIENTS, drawn, frame, of_program, repeated

CASES: list[tuple[str, Any]] = [
    ("y ~ age", "gaussian"),
    ("y ~ scale(age) * sex + (1 | site)", "gaussian"),
    ("y ~ 0 + arm + (0 + age | site)", "student"),
    ("y ~ scale(age) + offset(dose) + (1 + scale(age) | site) + (1 | year)", "gaussian"),
    ("died ~ age + beds + sex + (1 + sex || site)", "bernoulli"),
    ("k | trials(n) ~ age + (1 | site) + (1 + age | site:ward)", "binomial"),
    ("count ~ poly(age, 2) + beds + (1 + dose | site) + (1 + dose | region)", "poisson"),
    ("count ~ dose + (1 | region) + (1 | site) + (1 + dose | year)", "negative_binomial"),
    ("time | event(seen) ~ dose + (1 | site)", "weibull"),
    ("time ~ dose + (1 | site)", "exponential"),
    ("time ~ dose + (1 | site)", "lognormal"),
    ("time ~ dose + (1 | site)", "gamma"),
    ("time ~ dose + (1 | site)", families.piecewise_exponential((1.0, 4.0))),
    ("k | trials(n) ~ dose + (1 | site)", "beta_binomial"),
    ("count ~ dose + (1 | site)", "zero_inflated_poisson"),
    ("share ~ dose + (1 | site)", "beta"),
    ("share ~ dose + (1 | site)", "ordered_beta"),
    ("y ~ dose + (1 | site)", "skew_normal"),
    ("count ~ dose + (1 | site)", "zero_inflated_negative_binomial"),
    ("count ~ dose + (1 | site)", "hurdle_poisson"),
    ("time ~ dose + (1 | site)", "hurdle_gamma"),
    ("angle ~ dose + (1 | site)", "von_mises"),
    ("cbind(k, lost, count) | trials(all) ~ dose + (1 | site)", "multinomial"),
    ("cbind(most, left, rest) ~ dose + (1 + dose | site)", "dirichlet"),
    ("cbind(most, left, rest) ~ dose + (1 | site); phi ~ sex", "dirichlet"),
    ("y | trunc(lb=-5, ub=20) ~ dose + (1 | site)", "gaussian"),
    ("time | trunc(ub=100) ~ dose + (1 | site)", "weibull"),
    ("some | trunc(lb=1) ~ dose + (1 | site)", "negative_binomial"),
    ("grade ~ dose + (1 + dose | site)", "acat"),
    ("grade ~ cs(dose) + cs(sex) + age + (1 | site)", "sratio"),
    ("grade ~ 0 + cs(dose) + (1 | site)", "acat"),
    ("y ~ dose + (1 + dose | site) + (0 + dose | year)", families.gaussian("log")),
    ("died ~ dose + (1 | site)", families.bernoulli("cloglog")),
    ("grade ~ dose + (1 | site)", families.cumulative("probit")),
    ("grade ~ dose + (1 | site)", "cumulative"),
    ("grade ~ dose + sex + (1 + dose | site)", "categorical"),
    ("grade ~ dose + (1 | site) + (1 | year) + (1 | site:ward) + (1 | region)", "categorical"),
]
NAMES = [f"{getattr(family, 'name', family)}: {text}" for text, family in CASES]


@pytest.mark.parametrize(("text", "family"), CASES, ids=NAMES)
def test_rows_of_clients_have_the_mean_of_the_program_and_the_columns_of_their_frame(
    text: str, family: Any
) -> None:
    found = drawn(text, family, draws=2)
    if family == "student":  # below 1 it has no mean
        found = replace(found, shared={**found.shared, "nu": found.shared["nu"] + 1.0})
    wanted = of_program(found, frame())
    parts = []
    for k in range(len(found.clients)):
        rows = rows_of_client(found.formula, found.data, k)
        values = parameters_at(found, rows, k)
        parts.append(mean_response(found, predictor(found, rows, k), values, rows))
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-6, atol=1e-8)
    south = frame().query("site == 'south'")
    ready = prepared(south, predictors(found.formula), "south")
    from_frame = evaluated(found.formula, ready, "south", {})
    from_data = rows_of_client(found.formula, found.data, found.clients.index("south"))
    torch.testing.assert_close(from_data.common, from_frame.common)
    torch.testing.assert_close(from_data.offset, from_frame.offset)
    for site, columns in from_frame.groups.items():
        torch.testing.assert_close(from_data.groups[site], columns)


def test_new_groups_have_the_covariance_of_the_group_level() -> None:
    found = repeated(drawn("y ~ age + (1 + age | site)"), 4000)
    correlation = torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
    shared = {
        **found.shared,
        "sd_site": torch.tensor([2.0, 0.5]).double().expand(found.count, 2),
        "L_site": torch.linalg.cholesky(correlation).expand(found.count, 2, 2),
    }
    fixed = replace(found, shared=shared)
    (term,) = fixed.layout.groups
    deviations = fixed.of_new(term)[..., 0]
    covariance = torch.cov(deviations.T)
    torch.testing.assert_close(
        covariance, torch.tensor([[4.0, 0.6], [0.6, 0.25]]).double(), rtol=0.1, atol=0.02
    )
    assert deviations.mean(0).abs().max() < 0.12
    assert not torch.equal(deviations, replace(fixed, seed=1).of_new(term)[..., 0])


def test_groups_named_in_at_are_those_groups_and_others_are_typical() -> None:
    found = drawn("y ~ dose + (1 | site) + (1 | region) + (1 | year)")
    plain = predictor(found, typical(found.formula, None, {}), None)[:, 0]
    warm = predictor(found, typical(found.formula, {"region": "warm"}, {}), None)[:, 0]
    torch.testing.assert_close(warm - plain, found.shared["region"][:, 1])
    late = predictor(found, typical(found.formula, {"year": "y1"}, {}), None)[:, 0]
    torch.testing.assert_close(late - plain, found.shared["year"][:, 1])
    # a client lies in its own region unless another one is named
    rows = typical(found.formula, None, {})
    k = found.clients.index("south")
    own = found.own["site"][:, k] + found.shared["dose"] * frame()["dose"].mean()
    torch.testing.assert_close(predictor(found, rows, k)[:, 0], own)
    elsewhere = predictor(found, typical(found.formula, {"region": "cold"}, {}), k)[:, 0]
    wanted = own + found.shared["region"][:, 0] - found.shared["region"][:, 1]
    torch.testing.assert_close(elsewhere, wanted)


def test_clients_are_asked_for_by_name() -> None:
    found = drawn("y ~ dose + (1 | site)", draws=2)
    order = found.clients
    assert set(order) == set(CLIENTS)
    assert list(asked(found, None)) == [("", None)]
    assert list(asked(found, "south")) == [("south", order.index("south"))]
    assert list(asked(found, "each"))[-1] == ("new", "new")
    assert [name for name, _ in asked(found, ["west", "east"])] == ["west", "east"]
    with pytest.raises(KeyError, match="client 'center' was not fitted"):
        list(asked(found, "center"))
    named = replace(found, clients=("new", *order[1:]))
    with pytest.raises(ValueError, match="also the name of a client"):
        list(asked(named, "new"))
    assert list(asked(named, ["new"])) == [("new", 0)]
