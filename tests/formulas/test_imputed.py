"""mi(x): a missing covariate is integrated out of the likelihood of its row, and nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pytest
from pyro import poutine

import hierfl
from hierfl import Formula
from hierfl.nodes.agreed_schema import agreed_over, answer_schema
from tests.formulas.frames import patients
from tests.formulas.small import refused
from tests.formulas.test_left_side import of_rows

DOSE = "dose | mi() ~ beds + (1 | site)"
TERMS = "mi(dose) * sex + (1 + mi(dose) | site) + (0 + mi(dose) | year)"
TEXTS = {
    f"y ~ {TERMS}; {DOSE}": "gaussian",
    f"ill ~ {TERMS} + mi(age); {DOSE}; age | mi() ~ sex": "bernoulli",
    f"visits ~ {TERMS}; {DOSE}": "poisson",
    f"grade ~ {TERMS}; {DOSE}": "cumulative",
    f"days | event(died) ~ {TERMS}; {DOSE}": "lognormal",
    f"y | weights(w) ~ {TERMS} + (0 + mi(dose) | region); {DOSE}; sigma ~ sex": "gaussian",
}


def made(text: Any, family: str = "gaussian", frame: Any = None, **options: Any) -> Formula:
    declared = hierfl.formula(text, family, clients="site", **options)
    return declared if frame is None else declared.on(frame)


def lacking(columns: tuple[str, ...] = ("dose",), rows: int = 6) -> pd.DataFrame:
    """Patients of whom a third lacks a dose; one site knows none."""
    frame, rng = patients(rows), np.random.default_rng(1)
    for name in columns:
        frame.loc[rng.random(len(frame)) < 0.35, name] = np.nan
    frame.loc[frame["site"] == "s3", "dose"] = np.nan
    return frame


def conditioned(formula: Formula, frame: pd.DataFrame, values: dict[str, Any]) -> Any:
    """Return a trace of the program on some rows, at given latent sites."""
    pyro.set_rng_seed(0)
    batch = hierfl.full_batch(formula.data(frame))
    trace = poutine.trace(poutine.condition(formula, data=values)).get_trace(batch)
    trace.compute_log_prob()
    return trace


FAIR = {
    **dict.fromkeys(("mi(dose)", "site", "year", "region", "mi(dose):sex", "sex"), (-1.0, 1.0)),
    **{"Intercept": (-1.0, 1.0), "mi(age)": (-0.05, 0.05), "sigma": (0.3, 1.5)},
    **{"dose_Intercept": (1.0, 3.0), "dose_beds": (-0.01, 0.01), "sigma_dose": (0.5, 1.5)},
    **{"age_Intercept": (45.0, 55.0), "age_sex": (-5.0, 5.0), "sigma_age": (6.0, 12.0)},
    **{"dose_site": (0.0, 3.0), "sigma_Intercept": (-1.0, 0.5), "sigma_sex": (-0.5, 0.5)},
}


def latent(trace: Any) -> dict[str, Any]:
    """Return the values of latent sites, moved to a fair size."""
    sites = {n: s for n, s in trace.nodes.items() if s["type"] == "sample"}
    found = {n: s["value"] for n, s in sites.items() if not s["is_observed"]}
    fair = {n: FAIR[plain] for n in found if (plain := n.removesuffix("_centered")) in FAIR}
    found = {n: v.clamp(*fair[n]) if n in fair else v for n, v in found.items()}
    return {n: v for n, v in found.items() if n not in ("clients", "data")}


def by_row(trace: Any, name: str, frame: pd.DataFrame) -> np.ndarray:
    site = trace.nodes[name]
    if name in trace.nodes and site["fn"].__class__.__name__ == "Unit":
        counts = frame.groupby("site", sort=False).size()
        each = site["fn"].log_factor.numpy()
        return np.concatenate([row[:n] for row, n in zip(each, counts, strict=True)])
    return of_rows(trace, name, frame)


def on_a_grid(
    formula: Formula, frame: pd.DataFrame, values: dict[str, Any], i: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return values of what row i lacks, and the log density of the row at each: the program reads them as known."""
    ends = {"dose": (-9.0, 13.0), "age": (-20.0, 120.0)}
    names = [n for n in formula.declared.imputed if np.isnan(frame.loc[i, n])]
    at = {n: np.linspace(*ends[n], 61 if len(names) == 2 else 401) for n in names}
    grid = np.meshgrid(*at.values(), indexing="ij")
    many = frame.iloc[[i] * grid[0].size].reset_index(drop=True)
    many = many.assign(**{n: g.ravel() for n, g in zip(names, grid, strict=True)})
    here = int(frame["site"][i][1:])
    of_client = {n: values[n][[here]] for n in ("site", "site:ward", "dose_site") if n in values}
    one = conditioned(formula, many, values | of_client)
    weight = float(frame["w"][i]) if "weights" in formula.text else 1.0
    each = by_row(one, formula.declared.parts.response, many) / weight
    for name in names:
        each = each + by_row(one, name, many)
    return at, each.reshape(grid[0].shape)


@pytest.mark.filterwarnings("ignore:column .* more than 8 sds")  # integrals reach far out
@pytest.mark.parametrize("text", TEXTS)
def test_the_density_of_a_row_is_integrated_over_what_it_lacks(text: str) -> None:
    lacks = tuple(name for name in ("dose", "age") if f"mi({name})" in text)
    frame = lacking(lacks)
    formula = made(text, TEXTS[text], frame)
    values = latent(conditioned(formula, frame, {}))
    response = text.split()[0]
    found = by_row(conditioned(formula, frame, values), response, frame)
    gone = frame[[*lacks]].isna()
    assert gone.all(axis=1).any() and not gone.any(axis=1).all()
    for i in np.flatnonzero(gone.any(axis=1))[::3]:
        at, each = on_a_grid(formula, frame, values, i)
        for x in reversed(at.values()):
            top = each.max(-1, keepdims=True)
            each = np.log(np.trapezoid(np.exp(each - top), x, axis=-1)) + top[..., 0]
        weight = float(frame["w"][i]) if "weights" in text else 1.0
        np.testing.assert_allclose(found[i], weight * each, rtol=1e-3, atol=1e-3)


def test_nothing_is_missing() -> None:
    """The response has the density of the plain formula, and the covariate that of its own."""
    frame = patients(6)
    trace = conditioned(made(f"y ~ {TERMS}; {DOSE}", frame=frame), frame, {})
    values = {n.replace("mi(dose)", "dose"): v for n, v in latent(trace).items()}
    of_y = conditioned(made(f"y ~ {TERMS}".replace("mi(dose)", "dose"), frame=frame), frame, values)
    renamed = {n.removeprefix("dose_"): v for n, v in values.items() if n.startswith("dose_")}
    renamed |= {"sigma": values["sigma_dose"], "sd_site": values["sd_dose_site"]}
    of_dose = conditioned(made(DOSE.replace(" | mi()", ""), frame=frame), frame, renamed)
    here = conditioned(made(f"y ~ {TERMS}; {DOSE}", frame=frame), frame, latent(trace))
    for name, other in (("y", of_y), ("dose", of_dose)):
        wanted = by_row(other, name, frame)
        np.testing.assert_allclose(by_row(here, name, frame), wanted, rtol=1e-6, atol=1e-8)


def test_the_schema_has_the_means_of_known_values_alone() -> None:
    frame = lacking()
    agreed = made(f"y ~ mi(dose) * sex; {DOSE}", frame=frame).agreed
    known = frame["dose"].dropna()
    for of in (agreed.columns["dose"], agreed.design["mi(dose)"]):
        np.testing.assert_allclose([of.mean, of.sd], [known.mean(), known.std(ddof=0)], rtol=1e-9)
    assert agreed.rows == len(frame)
    assert agreed.design["sex[m]"].mean == pytest.approx((frame["sex"] == "m").mean())
    priors: dict[str, Any] = dict(made(f"y ~ mi(dose); {DOSE}", frame=frame).all_priors)
    start, spread = priors["dose_Intercept"], priors["sigma_dose"].base_dist
    np.testing.assert_allclose([start.loc, start.df], [known.mean(), 3.0], rtol=1e-5)
    np.testing.assert_allclose(spread.scale, 2.5 * known.std(ddof=0), rtol=1e-4)
    # a word among numbers is none of them, and other columns may lack nothing
    words = frame.assign(dose=frame["dose"].astype(object).where(frame["dose"].notna(), "nan"))
    refused(lambda: made(f"y ~ mi(dose) * sex; {DOSE}", frame=words), "'dose'", "holds words")
    refused(
        lambda: made(f"y ~ mi(dose) + age; {DOSE}", frame=lacking(("dose", "age"))),
        "'age'", "is missing 2 of 6 values", "missing='drop'",
    )  # fmt: skip


def test_a_client_that_knows_few_values_tells_none(tmp_path: Path) -> None:
    frame = lacking()
    few = frame["site"].isin(["s5"]) & (np.arange(len(frame)) % 6 > 2)
    frame.loc[frame["site"] == "s5", "dose"] = 1000.0
    frame.loc[few, "dose"] = np.nan
    formula = made(f"y ~ mi(dose) + (1 | site); {DOSE}")
    parts = {str(site): part for site, part in frame.groupby("site")}

    def send(content: bytes) -> dict[str, bytes]:
        return {n: answer_schema(formula, {n: f}, tmp_path / n, content) for n, f in parts.items()}

    over, left_out, _ = agreed_over(formula, send)
    assert not left_out and over.agreed == hierfl.schema(parts, formula, min_count=5)
    lines = [str(path.read_bytes()) for path in (tmp_path / "s5").rglob("*") if path.is_file()]
    assert over.agreed.columns["dose"].mean < 100.0 and not any("3000" in line for line in lines)
    read = over.data(parts).fields
    assert not bool((read["mi_dose"] > 999.0).any()) and float(read["has_dose"].sum()) < len(frame)


@pytest.mark.parametrize(
    ("text", "family", "words"),
    [
        ("y ~ mi(dose)", "gaussian", ["needs a formula", "dose | mi() ~ z"]),
        (f"y ~ age; {DOSE}", "gaussian", ["no term", "mi(dose)"]),
        ("y ~ mi(dose); dose ~ age", "gaussian", ["dose | mi() ~ age"]),
        (f"y ~ mi(dose) + dose; {DOSE}", "gaussian", ["'dose'", "another place"]),
        (f"y ~ mi(dose) + (1 | dose); {DOSE}", "gaussian", ["another place"]),
        (f"y ~ mi(dose); sigma ~ mi(dose); {DOSE}", "gaussian", ["formula of", "only in that of the response"]),
        (f"y ~ mi(dose) + mi(age); {DOSE}; age | mi() ~ mi(dose)", "gaussian", ["'mi(dose)'", "only in"]),
        (f"y ~ mi(dose) * mi(age); {DOSE}; age | mi() ~ 1", "gaussian", ["mi(dose):mi(age)"]),
        (f"y ~ scale(mi(dose)); {DOSE}", "gaussian", ["scale(mi(dose))", "make a column"]),
        (f"y ~ log(mi(dose)); {DOSE}", "gaussian", ["log(mi(dose))", "make a column"]),
        (f"y ~ mi(log(dose)); {DOSE}", "gaussian", ["mi(log(dose))", "single column"]),
        (f"kind ~ mi(dose); {DOSE}", "categorical", ["'categorical'", "one linear predictor"]),
        (f"y ~ mi(dose); {DOSE}", "student", ["'student'"]),
        ("y | mi() ~ age", "gaussian", ["no addition 'mi'"]),
        ("y ~ mi(dose); dose | mi(w) ~ age", "gaussian", ["'dose | mi() ~ age'", "measurement"]),
    ],
)  # fmt: skip
def test_what_is_refused_when_it_is_declared(text: str, family: str, words: list[str]) -> None:
    refused(lambda: made(text, family), *words)


def test_what_is_refused_of_rows() -> None:
    frame = lacking()
    text = f"y ~ mi(dose) + (1 | site); {DOSE}"
    refused(lambda: made(text, frame=frame.drop(columns="dose")), "'dose'", "no column")
    refused(lambda: made(text, frame=frame.assign(dose=np.nan)), "mi()", "enough values")
    refused(lambda: made(text, frame=frame.assign(dose="much")), "'dose'", "much")
    infinite = frame.assign(dose=frame["dose"].where(frame.index > 0, np.inf))
    refused(lambda: made(text, frame=infinite), "'dose'", "row 0", "infinite")
    beds = frame.assign(beds=frame["beds"].where(frame["site"] != "s2"))
    of_sites = "y ~ mi(beds) + (1 | site); beds | mi() ~ age"
    refused(lambda: made(of_sites, frame=beds), "mi(beds)", "one value per client")


def test_a_covariate_of_0_and_1_is_warned_of() -> None:
    frame = lacking().assign(died=lambda f: f["died"].where(f.index % 4 > 0))
    with pytest.warns(UserWarning, match=r"'mi\(died\)' is 0 or 1, and mi\(\) treats it as Normal"):
        made("y ~ mi(died) * sex; died | mi() ~ age", frame=frame)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k-hat")  # of few rows
@pytest.mark.filterwarnings("ignore:.*of 48 rows have a k-hat above")  # of 200 draws, by chance
def test_answers_of_a_fit() -> None:
    frame = lacking()
    formula = made(f"y ~ mi(dose) + sex + (1 | site); {DOSE}", frame=frame)
    fit = hierfl.fit(formula, frame, seed=0, progress=False)
    sites = {"dose_Intercept", "dose_beds", "sigma_dose", "sd_dose_site", "mi(dose)", "dose_site"}
    posterior: Any = fit.posterior(draws=500)["posterior"]
    assert sites <= {*posterior.data_vars}
    table = fit.predict(frame).frame()
    assert table["mean"].notna().all() and table["log_score"].notna().all()
    lost = frame["dose"].isna().to_numpy()
    assert table.loc[lost, "sd"].mean() >= table.loc[~lost, "sd"].mean()
    assert len(hierfl.diagnostics.loo(fit, draws=200).table) == len(frame)
    # a unit of the covariate moves the response by its coefficient
    moved = fit.comparisons("dose", values=1.0, draws=500).draws
    drawn = posterior["mi(dose)"]
    assert float(moved.mean()) == pytest.approx(float(drawn.mean()), abs=0.3 * float(drawn.std()))
    # what is missing is drawn, given the response; averages over rows rest on it
    found = fit.imputed(prob=0.95, draws=200)
    assert found.draws.dims == ("chain", "draw", "value")
    assert "Missing values of dose" in str(found) and "95%" in str(found)
    assert found.frame["row"].tolist() == [*frame.index[lost]]
    assert (found.draws["client"].to_numpy() == frame.loc[lost, "site"]).all()
    assert 0.0 < fit.r2().frame.loc["marginal", "mean"] < 1.0
