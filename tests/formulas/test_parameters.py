"""Terms of a family's parameters: the program is written out by hand, and answers read them row by row."""

from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import gamma

import hierfl
from hierfl.effects.comparisons import comparisons, predictions
from hierfl.effects.conditional_effects import effects, survival
from hierfl.effects.predictor_rows import rows_of_client
from hierfl.effects.variance import icc, r2
from tests.effects.made import drawn, frame, of_program, with_shared
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value

TEXT = "y ~ age + (1 | site); sigma ~ sex + dose + (1 + dose | site)"


def made(text: Any = TEXT, family: Any = "gaussian", **options: Any) -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site", **options).on(patients())


def coefficients(trace: Any, name: str) -> np.ndarray:
    return value(trace, name).reshape(8, -1)


def test_the_density_is_that_of_the_model_written_out() -> None:
    rows, formula = patients(), made()
    trace = traced(formula, rows)
    site = rows["site"].str[1:].astype(int).to_numpy()
    x = {"m": (rows["sex"] == "m") * 1.0, "x": (rows["sex"] == "x") * 1.0, "dose": rows["dose"]}
    log_sigma = coefficients(trace, "sigma_site")[site]
    eta = coefficients(trace, "site")[site, 0] + value(trace, "age") * rows["age"]
    sex = value(trace, "sigma_sex")
    spread = np.exp(
        log_sigma[:, 0] + log_sigma[:, 1] * x["dose"] + sex[0] * x["m"] + sex[1] * x["x"]
    )
    wanted = stats.norm.logpdf(rows["y"], eta, spread).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-6)
    # the coefficients of clients vary about the common ones, the intercept at zero
    base = value(trace, "sigma_Intercept_centered") - (
        sex[0] * x["m"].mean()
        + sex[1] * x["x"].mean()
        + value(trace, "sigma_dose") * x["dose"].mean()
    )
    scale = value(trace, "sd_sigma_site")[:, None] * value(trace, "L_sigma_site")
    loc = np.array([base, value(trace, "sigma_dose")], dtype=float).reshape(-1)
    own = stats.multivariate_normal(loc, scale @ scale.T)
    wanted = own.logpdf(coefficients(trace, "sigma_site")).sum()
    np.testing.assert_allclose(
        trace.nodes["sigma_site"]["log_prob"].sum().item(), wanted, rtol=1e-6
    )


def test_default_priors_are_on_the_scale_of_the_link() -> None:
    known: dict[str, Any] = dict(made().all_priors)
    assert "sigma" not in known
    start = known["sigma_Intercept"]
    log_sd = np.log(patients()["y"].std(ddof=0))
    np.testing.assert_allclose([start.loc, start.scale, start.df], [log_sd, 2.5, 3.0], rtol=1e-5)
    sd = patients()["dose"].std(ddof=0)
    np.testing.assert_allclose(known["sigma_dose"].scale, 2.5 / sd, rtol=1e-4)
    np.testing.assert_allclose(known["sd_sigma_site[Intercept]"].base_dist.scale, 2.5, rtol=1e-6)
    own = made(
        priors={"sigma_dose": "normal(0, 1)", "sd_sigma_site": "normal(0, 2)", "b": "cauchy(0, 1)"}
    )
    assert own.all_priors["sigma_dose"].scale == 1.0  # type: ignore[union-attr]
    table = own.prior_summary().set_index("site")["source"]
    assert list(table[table == "user"].index) == [
        *("age", "sigma_dose", "sd_sigma_site[Intercept]", "sd_sigma_site[dose]")
    ]
    assert "Normal" in str(own.all_priors["sigma_sex[m]"]) and "Cauchy" in str(
        own.all_priors["age"]
    )


def test_a_list_is_one_text() -> None:
    formula = made(["y ~ age + beds + (1 | site) + (1 | region)", "sigma ~ beds + (1 | site)"])
    assert formula.text == "y ~ age + beds + (1 | site) + (1 | region); sigma ~ beds + (1 | site)"
    assert formula.update("~ . - age").text.startswith(
        "y ~ beds + (1 | site) + (1 | region); sigma"
    )
    assert repr(formula).splitlines()[:2] == [
        "Formula: y ~ age + beds + (1 | site) + (1 | region)",
        "         sigma ~ beds + (1 | site)",
    ]
    assert hierfl.Schema.of_json(formula.agreed.json()) == formula.agreed


def test_an_empty_formula_is_one_number() -> None:
    trace = traced(made("y ~ age; sigma ~ 1"), patients())
    eta = value(trace, "Intercept_centered") + value(trace, "age") * (
        patients()["age"] - patients()["age"].mean()
    )
    wanted = stats.norm.logpdf(patients()["y"], eta, np.exp(value(trace, "sigma_Intercept"))).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-5)


# shapes far below 1 have no mean in double precision
NARROW = {"shape_Intercept": "normal(0.5, 0.2)", "shape_sex": "normal(0, 0.3)"}
FAMILIES: list[tuple[str, str, dict[str, str]]] = [
    ("count ~ dose + (1 | site); zi ~ sex + (1 | site) + (1 | year)", "zero_inflated_poisson", {}),
    ("count ~ dose; shape ~ beds + (1 + dose || site)", "zero_inflated_negative_binomial", {}),
    ("time ~ dose + (1 | site); hu ~ (1 | site) + (1 | site:ward)", "hurdle_gamma", {}),
    (
        "time | event(seen) ~ dose; shape ~ sex + (1 | region)",
        "weibull",
        NARROW | {"sd_shape_region": "normal(0, 0.3)"},
    ),
    ("y ~ dose + (1 | site); sigma ~ poly(age, 2) + (1 | site)", "gaussian", {}),
]


@pytest.mark.parametrize(("text", "family", "priors"), FAMILIES, ids=[f for _, f, _ in FAMILIES])
def test_answers_have_the_programs_mean(text: str, family: str, priors: dict[str, str]) -> None:
    found = drawn(text, family, draws=6, priors=priors)
    rows = frame()
    wanted = of_program(found, rows)
    table = predictions(found, by="site").frame.set_index("site")["mean"]
    names = rows.set_index("site").loc[list(found.clients)].index
    for client in found.clients:
        np.testing.assert_allclose(table[client], wanted[:, names == client].mean(), rtol=1e-5)
    again = predictions(found, newdata=rows, by="site").frame["mean"]
    np.testing.assert_allclose(again, table, rtol=1e-5)
    # on made-up rows as on those of a client
    one = rows[rows["site"] == "east"].iloc[[0]]
    at: dict[str, Any] = {
        n: one[n].iloc[0]
        for n in ("dose", "sex", "age", "beds")
        if n in found.formula.declared.columns
    }
    if "year" not in text and "ward" not in text:
        made_up = effects(found, "dose", grid=[at.pop("dose")], at=at, client="east").frame["mean"]
        place = int(np.flatnonzero(names == "east")[0])
        np.testing.assert_allclose(made_up[0], wanted[:, place].mean(), rtol=1e-5)


@pytest.mark.slow
def test_a_new_client_has_deviations_of_its_own_in_each_part() -> None:
    found = drawn("time ~ dose + (1 | site); shape ~ (1 | site)", "gamma", draws=1500)
    (eta,), (own,) = found.layout.groups, found.with_terms["shape"].layout.groups
    first, second = found.of_new(eta)[:, 0, 0], found.with_terms["shape"].of_new(own)[:, 0, 0]
    first = first / found.shared["sd_site"]
    second = second / found.shared["sd_shape_site"]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.09
    np.testing.assert_allclose(second.std(), 1.0, atol=0.07)


def test_survival_reads_the_shape_of_each_row() -> None:
    found = with_shared(
        drawn("time ~ dose; shape ~ arm", "weibull", draws=20),
        Intercept=1.0,
        shape_Intercept=0.3,
        shape_arm=[0.4, -0.6],
    )
    table = survival(found, by="arm", times=[1.0, 4.0], client=None).frame
    base = found.shared["shape_Intercept_centered"].numpy()
    b = found.shared["shape_arm"].numpy()
    share = [(frame()["arm"] == arm).mean() for arm in "bc"]
    start = base - b[:, 0] * share[0] - b[:, 1] * share[1]
    for arm, shift in (("a", 0.0), ("b", b[:, 0]), ("c", b[:, 1])):
        shape = np.exp(start + shift)
        scale = np.exp(found.shared["Intercept_centered"].numpy()) / gamma(1.0 + 1.0 / shape)
        wanted = stats.weibull_min.sf(4.0, shape, scale=scale).mean()
        part = table[(table["arm"] == arm) & (table["time"] == 4.0)]["mean"]
        np.testing.assert_allclose(part, wanted, rtol=1e-4, atol=1e-7)


def test_r2_has_the_noise_of_each_row() -> None:
    found = drawn("y ~ dose; sigma ~ dose", draws=20)
    rows = frame()
    dose = rows["dose"].to_numpy()
    mean = dose.mean()
    s = {
        n: found.shared[n].numpy()[:, None]
        for n in ("Intercept_centered", "dose", "sigma_Intercept_centered", "sigma_dose")
    }
    mu = s["Intercept_centered"] + s["dose"] * (dose - mean)
    noise = np.exp(2 * (s["sigma_Intercept_centered"] + s["sigma_dose"] * (dose - mean))).mean(1)
    wanted = (mu.var(1) / (mu.var(1) + noise)).mean()
    np.testing.assert_allclose(r2(found).frame["mean"]["conditional"], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="sigma of gaussian has terms, so that no variance"):
        icc(drawn("y ~ dose + (1 | site); sigma ~ dose", draws=2))
    with pytest.raises(ValueError, match="stores no single columns if parameters"):
        comparisons(found, "dose", "rows")


def test_hospitals_differ_in_their_residual_sd_and_the_fit_finds_them() -> None:
    rng = np.random.default_rng(1)
    names, sds = list("abcdefgh"), np.exp(np.linspace(-1.0, 1.0, 8))
    parts = [
        pd.DataFrame({"h": n, "y": 3.0 + rng.normal(0.0, sd, 40)})
        for n, sd in zip(names, sds, strict=True)
    ]
    rows = pd.concat(parts, ignore_index=True)
    formula = hierfl.formula(["y ~ 1", "sigma ~ (1 | h)"], clients="h")
    fit = hierfl.fit(formula, rows, seed=0, progress=False)
    own = fit.draws(400).own["sigma_h"].double()
    observed = np.array([np.sqrt(((p["y"] - 3.0) ** 2).mean()) for p in parts])
    np.testing.assert_allclose(own.mean(0).exp(), observed, rtol=0.12)
    # of a log sd with n rows: 1 / sqrt(2 n)
    np.testing.assert_allclose(own.std(0), 1 / np.sqrt(80), rtol=0.2)
    headings = [heading for heading, _ in fit.summary(draws=50).tables]
    assert headings == [
        "Population level",
        "Population level of sigma, link log",
        "Group level, sigma_h (8 groups)",
        "sigma_h: own coefficients by client",
    ]
    one = rows_of_client(fit.method.model, fit.federation.data, 0)  # type: ignore[arg-type]
    assert set(one.of_parameters) == {"sigma"}
    predicted = fit.predict(rows, draws=200)
    spread = predicted.sd[rows.groupby("h").head(1).index]  # type: ignore[index]
    np.testing.assert_allclose(spread, observed, rtol=0.15)


def test_a_prior_of_a_parameter_with_terms_is_refused() -> None:
    with pytest.raises(ValueError, match="priors has 'sigma', which has terms of its own"):
        made(priors={"sigma": dist.HalfNormal(1.0)}).all_priors  # noqa: B018
