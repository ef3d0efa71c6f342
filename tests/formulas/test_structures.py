"""Known covariance between groups and neighbors: densities by scipy, posteriors in closed form, over grids."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import hierfl
from hierfl.effects.drawn import drawn
from hierfl.effects.predictor import predictor
from hierfl.effects.predictor_rows import rows_of_client
from hierfl.program.wrapped import mixes_dtypes
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value

Array = np.ndarray[Any, Any]
SITES = [f"s{k}" for k in range(8)]
YEARS = ["2020", "2021", "2022", "2023"]


def covariance(names: list[str], seed: int = 0) -> pd.DataFrame:
    root = np.random.default_rng(seed).normal(size=(len(names), 2 * len(names)))
    return pd.DataFrame(root @ root.T / len(names), index=names, columns=names)


def ring(names: list[str]) -> pd.DataFrame:
    made = np.zeros((len(names), len(names)))
    for i in range(len(names)):
        made[i, (i + 1) % len(names)] = made[(i + 1) % len(names), i] = 1.0
    made[0, 2] = made[2, 0] = 1.0
    return pd.DataFrame(made, index=names, columns=names)


def formula_of(text: str, data2: Any, **options: Any) -> hierfl.Formula:
    return hierfl.formula(text, clients="site", data2=data2, **options).on(patients())


def prior_covariance(made: hierfl.Formula, site: str, trace: Any) -> Array:
    """The covariance of a term's values under its prior, from what the program draws."""
    basis = np.array(made.agreed.groups[site].basis)
    scale = trace.nodes[f"z_{site}"]["fn"].base_dist.scale.detach().numpy().reshape(-1)
    np.testing.assert_allclose(value(trace, site), basis @ value(trace, f"z_{site}"), rtol=1e-6)
    spread: Array = (basis * scale**2) @ basis.T
    return spread


def test_the_prior_of_groups_is_normal_with_the_covariance() -> None:
    a = covariance(YEARS)
    made = formula_of("y ~ age + (1 | site) + (1 | gr(year, cov=A))", {"A": a})
    trace = traced(made, patients())
    wanted = float(value(trace, "sd_gr(year)")) ** 2 * a.to_numpy()
    np.testing.assert_allclose(prior_covariance(made, "gr(year)", trace), wanted, rtol=1e-6)


def test_the_prior_of_neighbors_is_that_of_brms() -> None:
    m = ring(YEARS)
    made = formula_of("y ~ age + (1 | site) + car(M, gr=year)", {"M": m})
    trace = traced(made, patients())
    rho, sd = float(value(trace, "rho_car(year)")), float(value(trace, "sd_car(year)"))
    precision = (np.diag(m.sum()) - rho * m.to_numpy()) / sd**2
    got = prior_covariance(made, "car(year)", trace)
    np.testing.assert_allclose(got, np.linalg.inv(precision), rtol=1e-5)
    made = formula_of("y ~ age + car(M, gr=year, type='esicar')", {"M": m})
    trace = traced(made, patients())
    got = prior_covariance(made, "car(year)", trace)
    laplacian = (np.diag(m.sum()) - m.to_numpy()) / float(value(trace, "sd_car(year)")) ** 2
    np.testing.assert_allclose(got, np.linalg.pinv(laplacian), atol=1e-5)
    np.testing.assert_allclose(value(trace, "car(year)").sum(), 0.0, atol=1e-5)


TEXTS = [
    "y ~ age + (1 | gr(site, cov=A))",
    "y ~ age + (1 | site) + (1 | gr(site, cov=A))",
    "y ~ age + (1 | site) + car(M, gr=year) + (1 | year)",
    "y ~ dose + car(M, gr=site, type='esicar'); sigma ~ (1 | gr(year, cov=B))",
]
DATA2 = {"A": covariance(SITES), "B": covariance(YEARS)}


def matrices(text: str) -> dict[str, pd.DataFrame]:
    return DATA2 | {"M": ring(YEARS if "year)" in text and "gr=year" in text else SITES)}


@pytest.mark.parametrize("text", [*TEXTS, "y ~ age + (1 + age | site)"])
def test_a_program_needs_no_type_but_that_of_its_rows(text: str) -> None:
    """Else each of its operations is converted, at twice the time."""
    torch.set_default_dtype(torch.float32)  # as users have it
    made = formula_of(text, matrices(text))
    assert not mixes_dtypes(made, hierfl.full_batch(made.data(patients())))


@pytest.mark.parametrize("text", TEXTS)
def test_the_likelihood_reads_the_own_group(text: str) -> None:
    rows, made = patients(), formula_of(text, matrices(text))
    trace = traced(made, rows)
    column = "age" if "age" in text else "dose"
    eta = value(trace, column) * (rows[column] - rows[column].mean())
    site = rows["site"].str[1:].astype(int).to_numpy()
    year = (rows["year"] - 2020).to_numpy()
    for name in ("gr(year)", "car(year)", "year"):
        eta = eta + (value(trace, name)[year] if name in trace.nodes else 0.0)
    structured = next((n for n in ("gr(site)", "car(site)") if n in trace.nodes), "")
    if "site" in trace.nodes:  # own intercepts are totals, the structure is in their mean
        own = value(trace, "site").reshape(-1)
        base = value(trace, "Intercept_centered") - value(trace, column) * rows[column].mean()
        mean = base + (value(trace, structured) if structured else 0.0)
        wanted = stats.norm.logpdf(own, mean, value(trace, "sd_site")).sum()
        np.testing.assert_allclose(trace.nodes["site"]["log_prob"].sum().item(), wanted, rtol=1e-6)
        eta = eta + own[site] + value(trace, column) * rows[column].mean()
    else:
        eta = eta + value(trace, "Intercept_centered") + value(trace, structured)[site]
    sigma = value(trace, "sigma") if "sigma" in trace.nodes else None
    if sigma is None:
        log = value(trace, "sigma_Intercept") + value(trace, "sigma_gr(year)")[year]
        sigma = np.exp(log)
    wanted = stats.norm.logpdf(rows["y"], eta, sigma).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-5)
    assert hierfl.Schema.of_json(made.agreed.json()) == made.agreed


def regions(rows: int = 6, seed: int = 4) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Ten counties on a line, whose levels are alike where they are near."""
    rng, names = np.random.default_rng(seed), [f"c{k}" for k in range(10)]
    place = np.arange(10.0)
    a = pd.DataFrame(np.exp(-abs(place[:, None] - place) / 3.0), index=names, columns=names)
    level = np.linalg.cholesky(a.to_numpy()) @ rng.normal(size=10)
    county = np.repeat(np.arange(9), rows)  # the last one has no rows
    y = 1.0 + level[county] + rng.normal(0.0, 0.6, len(county))
    return pd.DataFrame({"county": np.array(names)[county], "y": y}), a


@pytest.mark.slow
def test_a_county_without_rows_is_known_from_its_neighbors() -> None:
    rows, a = regions()
    made = hierfl.formula("y ~ 1 + (1 | gr(county, cov=A))", clients="county", data2={"A": a})
    fit = hierfl.fit(made, rows, seed=0, progress=False)
    assert "Trustworthy" in fit.summary(draws=200).verdict
    sd = fit.draws(4000).shared["gr(county)"].double().numpy().std(0)
    assert sd[9] > 1.2 * sd[4]

    # the county without rows is predicted, and one that no matrix has is refused
    new = pd.DataFrame({"county": ["c9"], "y": [0.0]})
    assert fit.method.model.data(new).client_fields  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not one of c0, c1"):
        fit.method.model.data(new.assign(county="c77"))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a new group is not in the matrix 'A'"):
        found = drawn(fit, "effects", draws=50, seed=0)
        predictor(found, replace(rows_of_client(found.formula, found.data, 0), codes={}), "new")


def test_what_cannot_be_is_refused() -> None:
    a, m = covariance(SITES), ring(SITES)
    cases: list[tuple[str, str, Any]] = [
        ("y ~ (1 | gr(site, cov=A))", "needs the matrix 'A': give data2", None),
        ("y ~ car(M, gr=site) + car(N, gr=site)", "appears twice", {"M": m}),
        ("y ~ (1 | gr(site))", "has no 'cov': write gr", {"A": a}),
        ("y ~ (1 + age | gr(site, cov=A))", "must be \\(1 \\| gr", {"A": a}),
        (
            "y ~ (1 | gr(site, cov=A))",
            "client 's7' is not among the groups of 'A'",
            {"A": a.iloc[:7, :7]},
        ),
        ("y ~ (1 | gr(site, cov=A))", "not positive definite", {"A": a * 0 + 1.0}),
        ("y ~ (1 | gr(site, cov=A))", "not symmetric", {"A": a + np.eye(8, k=1)}),
        ("y ~ (1 | gr(year, cov=A))", "a group of 'year' that is not in 'A'", {"A": a}),
        ("y ~ car(M, gr=site)", "must be 1 for neighbors", {"M": a}),
        ("y ~ car(M, gr=site)", "'s0' has no neighbor", {"M": m * 0}),
        (
            "y ~ car(M, gr=site, type='bym2')",
            "type of car\\(\\) is 'bym2': it must be 'escar' or 'esicar'",
            {"M": m},
        ),
    ]
    two = pd.DataFrame(np.kron(np.eye(4), [[0.0, 1], [1, 0]]), index=SITES, columns=SITES)
    cases.append(("y ~ car(M, gr=site, type='esicar')", "no chain of neighbors", {"M": two}))
    for text, message, data2 in cases:
        with pytest.raises(ValueError, match=message):
            formula_of(text, data2).program()
    with pytest.raises(TypeError, match="give a frame with the groups"):
        formula_of("y ~ (1 | gr(site, cov=A))", {"A": a.to_numpy()})
    with pytest.raises(ValueError, match="values that are not finite numbers"):
        formula_of("y ~ (1 | gr(site, cov=A))", {"A": a.astype(str)})
    with pytest.raises(ValueError, match="not the same names"):
        formula_of("y ~ (1 | gr(site, cov=A))", {"A": a.set_axis(range(8), axis=1)})


@pytest.mark.slow  # of nodes
def test_nodes_need_no_matrix_and_a_fit_is_saved(tmp_path: Any) -> None:
    rows, a = regions()
    text = "y ~ 1 + (1 | gr(county, cov=A))"
    near = hierfl.fit(
        hierfl.formula(text, clients="county", data2={"A": a}), rows, seed=0, progress=False
    )
    parts = {str(name): part for name, part in rows.groupby("county")}
    nodes = hierfl.nodes.in_process(parts, tmp_path / "nodes")
    over = hierfl.nodes.fit(hierfl.formula(text, clients="county", data2={"A": a}), nodes, seed=0)
    one, two = (found.draws(2000).shared["gr(county)"].double() for found in (near, over.here))
    np.testing.assert_allclose(one.mean(0), two.mean(0), atol=0.1 * float(one.std(0).min()))
    near.save(tmp_path / "fit", with_data=True)
    again = hierfl.load(tmp_path / "fit")
    np.testing.assert_allclose(again.predict(rows).mean, near.predict(rows).mean, rtol=1e-6)
    headings = dict(near.summary(draws=50).tables)
    assert not any("z_gr" in str(name) for table in headings.values() for name in table.index)


def test_a_node_answers_about_groups_with_a_structure() -> None:
    from hierfl.formulas.questions import Question, own_answer
    from hierfl.formulas.read_rows import ReadRows

    rows, text = patients(), "y ~ age + (1 | site) + car(M, gr=year)"
    declared = hierfl.formula(text, clients="site").declared  # a node has no matrix
    asked = Question("outside", by=("year",), levels=tuple(YEARS[:3]))
    one = rows[rows["site"] == "s1"]
    assert own_answer(asked, ReadRows(declared, one, "s1")) == 1
    asked = Question("groups", by=("year",))
    assert own_answer(asked, ReadRows(declared, one, "s1")).distinct == 4
