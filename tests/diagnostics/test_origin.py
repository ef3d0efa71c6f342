"""The population's intercept and the clients' own are at one origin, 0 of all predictors, as in lme4."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import minimize
from scipy.special import softmax

import hierfl
from benchmarks.binary_models import schools_centered
from benchmarks.reference_models import schools
from hierfl.nodes import in_process
from tests.sampled import sampled

FORMULAS = ["g ~ x + (1 | h)", "b ~ x + (1 | h)", "g ~ x + (1 + x | h)"]
FAMILIES = {
    **{"g": "gaussian", "b": "bernoulli", "c": "poisson", "n": "negative_binomial"},
    **{"a": "gamma", "t | event(d)": "weibull", "o": "cumulative", "e": "poisson"},
    "m": "gaussian",
}
MOVED = [
    f"{response} ~ x + {own}"
    for response in FAMILIES
    if response not in "em"
    for own in ("(1 | h)", "(1 + x | h)", "w + (1 | h)", "w + (1 + x | h)")
]
MOVED += [  # parts of a formula that read columns otherwise
    "e ~ x + offset(s) + (1 | h)",
    "m ~ mo(q) + x + (1 | h)",
    "g ~ s(x) + (1 | h)",
    "m ~ x + (1 | h); sigma ~ x + (1 | h)",
]
QUICK = [  # of units and shifts
    ("e ~ x + offset(s) + (1 | h)", 1.0, 1000.0),
    ("g ~ x + (1 + x | h)", 1000.0, 0.0),
    ("b ~ x + (1 | h)", 1.0, 1000.0),
]
Numbers = NDArray[np.float64]


def sleep(seed: int = 0) -> pd.DataFrame:
    """Return reaction times of 18 people over ten days, simulated by lme4's estimates for sleepstudy."""
    rng = np.random.default_rng(seed)
    covariance = np.array([[24.74**2, 0.07 * 24.74 * 5.92], [0.07 * 24.74 * 5.92, 5.92**2]])
    own = rng.multivariate_normal([251.405, 10.467], covariance, 18)
    days = np.tile(np.arange(10.0), 18)
    mean = own[:, 0].repeat(10) + own[:, 1].repeat(10) * days
    people = np.repeat([f"p{k:02d}" for k in range(18)], 10)
    reaction = mean + rng.normal(0.0, 25.59, 180)
    return pd.DataFrame({"person": people, "days": days, "reaction": reaction})


def reml(frame: pd.DataFrame) -> tuple[Numbers, Numbers]:
    """Return fixef (2,) and coef (18, 2) of reaction ~ days + (1 + days | person), by REML as lmer has them."""
    x = np.column_stack([np.ones(10), np.arange(10.0)])
    y = frame["reaction"].to_numpy().reshape(18, 10)

    def parts(theta: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        lower = np.array([[np.exp(theta[0]), 0.0], [theta[1], np.exp(theta[2])]])
        between = lower @ lower.T
        whole = x @ between @ x.T + np.exp(2.0 * theta[3]) * np.eye(10)
        return between, whole, np.linalg.inv(whole)

    def fixed(inverse: Numbers) -> Numbers:
        return np.linalg.solve(18 * x.T @ inverse @ x, x.T @ inverse @ y.sum(0))

    def deviance(theta: Numbers) -> float:
        _, whole, inverse = parts(theta)
        left = y - x @ fixed(inverse)
        squares = float(np.einsum("ki,ij,kj->", left, inverse, left))
        logs = 18 * np.linalg.slogdet(whole)[1] + np.linalg.slogdet(x.T @ inverse @ x)[1]
        return squares + float(logs)

    found = minimize(
        deviance, np.array([3.0, 0.0, 1.5, 3.2]), method="Nelder-Mead", options={"maxiter": 5000}
    )
    between, _, inverse = parts(found.x)
    mean = fixed(inverse)
    return mean, mean + (y - x @ mean) @ inverse @ x @ between


def test_a_mixed_model_agrees_with_lmer() -> None:
    frame = sleep()
    fit = hierfl.fit(
        hierfl.formula("reaction ~ days + (1 + days | person)", clients="person"), frame, seed=0
    )
    table = fit.summary(draws=2000).frame
    fixef, coef = reml(frame)
    for place, site in enumerate(("Intercept", "days")):
        row = table[table["site"] == site]
        assert abs(row["mean"].item() - fixef[place]) < 0.1 * row["sd"].item(), site
        own = table[(table["site"] == "person") & (table["entry"] == site)]
        apart = np.abs(own["mean"].to_numpy(float) - coef[:, place]) / own["sd"].to_numpy(float)
        assert apart.max() < 0.25, site
        assert abs(own["mean"].mean() - row["mean"].item()) < 0.1 * row["sd"].item(), site


# ------------------------------------------------------------ one origin
@cache
def rows() -> pd.DataFrame:
    """Return 240 rows of six clients, with x far from 0."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"h": np.resize(list("abcdef"), 240), "x": rng.normal(40.0, 9.0, 240)})
    own = dict(zip("abcdef", rng.normal(0.0, 0.7, 6), strict=True))
    eta = frame["h"].map(own).to_numpy() + 0.04 * (frame["x"] - 40.0)
    time = np.exp(eta) * rng.weibull(1.5, 240) + 0.01
    end = np.quantile(time, 0.8)
    other = np.random.default_rng(4)
    s, q = other.normal(0.3, 0.5, 240), other.integers(0, 4, 240)
    spread = np.exp(0.03 * (frame["x"] - 40.0))
    return frame.assign(
        s=s,
        q=pd.Categorical.from_codes(q, list("1234"), ordered=True),
        e=other.poisson(np.exp(eta + s)),
        m=eta + 0.4 * q + spread * other.normal(size=240),
        w=frame["h"].map(dict(zip("abcdef", (10.0, 20.0, 30.0, 25.0, 15.0, 40.0), strict=True))),
        g=eta + rng.normal(size=240),
        b=(rng.random(240) < 1.0 / (1.0 + np.exp(-eta))).astype(int),
        c=rng.poisson(np.exp(eta)),
        n=rng.negative_binomial(3, 3.0 / (3.0 + np.exp(eta))),
        a=rng.gamma(3.0, np.exp(eta) / 3.0),
        t=np.minimum(time, end),
        d=(time <= end).astype(int),
        o=np.digitize(eta + rng.logistic(size=240), [-1.0, 0.5, 1.5]),
    )


@cache
def summarized(text: str, unit: float = 1.0, shift: float = 0.0) -> Any:
    """Return the summary of a fit with x and w, of one value per client, in other units and shifted."""
    formula = hierfl.formula(text.split("; "), FAMILIES[text.split(" ~ ")[0]], clients="h")
    frame = rows().assign(**{name: rows()[name] * unit + shift for name in ("x", "w")})
    return hierfl.fit(formula, frame, seed=0).summary()


def column(summary: Any, site: str, name: str, *entries: str) -> Numbers:
    """Return a column of a site's entries, by default its intercepts."""
    frame = summary.frame
    found = frame[(frame["site"] == site) & frame["entry"].isin(entries or ["", "Intercept"])]
    return found[name].to_numpy(float)


@pytest.mark.slow("b ~ x + (1 | h)", "g ~ x + (1 | h)")
@pytest.mark.parametrize("text", [*FORMULAS, "g ~ x + w + (1 | h)"])
def test_the_clients_intercepts_are_about_the_common_one(text: str) -> None:
    found = summarized(text, shift=1000.0 if " w " in text else 0.0)
    common, own = column(found, "Intercept", "mean"), column(found, "h", "mean")
    assert abs(own.mean() - common[0]) < 0.1 * column(found, "Intercept", "sd")[0]
    assert abs(column(found, "Intercept_centered", "mean")[0] - common[0]) > 1.0
    assert "Intercept_centered" not in str(found)
    if " w " in text:  # as `coef()` of lme4: they leave out what w explains, 30 slopes
        assert np.ptp(own) < 6.0 * column(found, "sd_h", "mean")[0]


@pytest.mark.slow("e ~ x + offset(s) + (1 | h)-1.0-1000.0")
@pytest.mark.parametrize(
    ("text", "unit", "shift"),
    sampled([(text, *by) for text in MOVED for by in ((1.0, 1000.0), (1000.0, 0.0))], QUICK),
)
def test_shifts_and_units_of_a_column_change_no_verdict_note_or_shrinkage(
    text: str, unit: float, shift: float
) -> None:
    plain, other = summarized(text), summarized(text, unit, shift)
    assert other.trustworthy is plain.trustworthy
    faults = [[c.verdict for c in of.checks if c.verdict != "good"] for of in (plain, other)]
    assert faults[0] == faults[1]
    assert len(plain.remarks) == len(other.remarks)
    assert len(plain.verdict.splitlines()) == len(other.verdict.splitlines())
    # other coordinates have other draws, whose k-hat may lie on either side of 0.5
    chains = [
        " by 64 chains" in v and "(k-hat 0.5" not in v for v in (plain.verdict, other.verdict)
    ]
    assert chains[0] == chains[1]
    for name in ("", "Intercept", "x"):  # an intercept's at the means, wherever it is reported
        before, after = (column(found, "h", "shrinkage", name) for found in (plain, other))
        np.testing.assert_allclose(after, before, rtol=0.1, atol=0.01)
    means, sds = (column(plain, "x", of) for of in ("mean", "sd"))
    assert (np.abs(column(other, "x", "mean") * unit - means) < 0.15 * sds).all()


@pytest.mark.slow
def test_slopes_of_each_client_take_no_more_rounds_far_from_0() -> None:
    """The prior of an intercept 100 sds from the rows and of a slope has a correlation of nearly 1.

    Its precision had no digits left, one draw outweighed all others, and 13 rounds took the place of 3.
    """
    formula = hierfl.formula("b ~ x + (1 + x | h)", "bernoulli", clients="h")
    fits = [
        hierfl.fit(formula, rows().assign(x=rows()["x"] + shift), seed=0)
        for shift in (-40.0, 1000.0)
    ]
    assert len(fits[0].history) == len(fits[1].history)


@pytest.mark.slow
def test_draws_are_the_same_numbers_far_from_0() -> None:
    """Factors were rounded in units of the largest entry: 0.4% of a slope's curvature after x + 1000."""
    formula = hierfl.formula("n ~ x + w + (1 | h)", FAMILIES["n"], clients="h")
    draws = []
    for shift in (0.0, 1000.0):
        frame = rows().assign(**{name: rows()[name] + shift for name in ("x", "w")})
        fit = hierfl.fit(formula, frame, seed=0)
        own: Any = fit.federation.server.weighted(fit.progress.server)
        draws.append(own.draws[:, [0, 3, 4]].quantile(torch.tensor([0.05, 0.5, 0.95]).double(), 0))
    assert (draws[1] - draws[0]).abs().max() < 0.02 * (draws[0][2] - draws[0][0]).min()


@pytest.mark.slow
def test_thresholds_are_where_predictors_are_0() -> None:
    """As brms and `ordinal::clmm` have them: logit P(o <= k) = threshold - 0.04 x, and clients about 0."""
    found = summarized("o ~ x + (1 | h)")
    at = column(found, "thresholds", "mean", "0", "1", "2")
    sds = column(found, "thresholds", "sd", "0", "1", "2")
    slope = column(found, "x", "mean")[0]
    centered = column(found, "thresholds_centered", "mean", "0", "1", "2")
    np.testing.assert_allclose(at, centered + slope * rows()["x"].mean(), atol=0.15 * sds.max())
    assert abs(column(found, "h", "mean").mean()) < column(found, "sd_h", "mean")[0]
    assert "thresholds_centered" not in str(found)


@pytest.mark.slow
def test_clients_whose_rows_say_little_are_named_wherever_x_lies() -> None:
    few = pd.concat([rows(), rows().head(2).assign(h="new", b=[0, 1])])
    notes = []
    for shift in (0.0, 1000.0):
        formula = hierfl.formula("b ~ x + (1 | h)", "bernoulli", clients="h")
        found = hierfl.fit(formula, few.assign(x=few["x"] + shift), seed=0).summary()
        notes.append([c.answer for c in found.checks if "own rows inform" in c.question])
    assert "(new)" in notes[0][0] and notes[0] == notes[1]


@pytest.mark.slow
def test_other_answers_have_the_same_origin(tmp_path: Path) -> None:
    formula = hierfl.formula(["g ~ x + (1 | h)", "sigma ~ x + (1 | h)"], "gaussian", clients="h")
    fit = hierfl.fit(formula, rows(), seed=0)
    idata: Any = fit.posterior(draws=2000)
    posterior = idata.posterior
    for site, own in (("Intercept", "h"), ("sigma_Intercept", "sigma_h")):
        means = posterior[own].mean(("chain", "draw")).values
        sd = float(posterior[site].std())
        assert abs(float(posterior[site].mean()) - means.mean()) < 0.15 * sd, site
        slope = posterior["x" if site == "Intercept" else "sigma_x"]
        back = posterior[f"{site}_centered"] - slope * rows()["x"].mean()
        np.testing.assert_allclose(back.values, posterior[site].values, rtol=1e-3, atol=1e-3)
    about = fit.hypotheses(["Intercept > 0"]).frame
    assert float(about["mean"].iloc[0]) == pytest.approx(
        float(posterior["Intercept"].mean()), abs=0.2
    )
    fit.save(tmp_path / "fit")
    loaded: Any = hierfl.load(tmp_path / "fit").posterior(draws=2000, var_names=["Intercept"])
    again = loaded.posterior
    np.testing.assert_allclose(again["Intercept"].values, posterior["Intercept"].values, rtol=1e-5)


@pytest.mark.slow
def test_a_fit_over_nodes_has_the_same_origin(tmp_path: Path) -> None:
    parts = {name: part.drop(columns="h") for name, part in rows().groupby("h")}
    formula = hierfl.formula("g ~ x + (1 | h)", clients="h")
    found = hierfl.nodes.fit(formula, in_process(parts, tmp_path), seed=0).summary()
    plain = summarized("g ~ x + (1 | h)")
    here, there = (column(of, "Intercept", "mean") for of in (plain, found))
    np.testing.assert_allclose(there, here, atol=0.1 * column(plain, "Intercept", "sd")[0])


# ------------------------------------------------------------ shrinkage
@cache
def of_schools() -> tuple[hierfl.Fit, pd.DataFrame]:
    """Return a fit of the eight schools, and what its summary says of them."""
    fit = hierfl.fit(schools_centered, hierfl.datasets.eight_schools(), seed=0)
    return fit, fit.summary().frame.query("site == 'theta'").set_index("client")


def test_shrinkage_of_the_eight_schools_is_exact() -> None:
    data = hierfl.datasets.eight_schools()
    fit, frame = of_schools()
    idata: Any = fit.posterior(draws=4000)
    tau = idata.posterior["tau"].values.flatten()
    for name, sigma in zip(data.names, data.fields["sigma"].tolist(), strict=True):
        exact = float((sigma**2 / (sigma**2 + tau**2)).mean())
        assert frame.loc[name, "shrinkage"] == pytest.approx(exact, abs=0.005), name
        assert frame.loc[name, "shrinkage_error"] < 0.005
    assert frame.loc["school B", "shrinkage"] == frame.loc["school G", "shrinkage"]
    assert frame.loc["school B", "shrinkage"] == pytest.approx(0.864, abs=0.005)
    assert frame.loc["school H", "shrinkage"] == pytest.approx(0.944, abs=0.005)


# prior of the scale site, the sd that it gives, and its log density
SCALES: dict[str, tuple[Any, Any, Any]] = {
    "uniform": (dist.Uniform(0.0, 1000.0), lambda v: v, lambda t: 0.0 * t),
    "log": (dist.Normal(1.0, 1.5), torch.exp, stats.lognorm(1.5, scale=np.e).logpdf),
    "precision": (
        dist.Gamma(2.0, 20.0),
        lambda v: v**-0.5,
        lambda t: stats.gamma(2.0, scale=0.05).logpdf(t**-2) - 3.0 * np.log(t),
    ),
}


def of_scale(prior: Any, link: Any) -> Any:
    def model(batch: hierfl.ClientBatch) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = link(pyro.sample("scale", prior))
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.data():
                pyro.sample("y", dist.Normal(theta, batch.sigma), obs=batch.y)

    return model


def exact_shrinkage(data: hierfl.ClientData, log_prior: Any, sds: Numbers) -> Numbers:
    """Return E[s^2 / (s^2 + tau^2)] of clients with errors of `sds`, by quadrature over tau."""
    y, sigma = (data.fields[name].numpy().astype(float) for name in ("y", "sigma"))
    taus = np.exp(np.linspace(np.log(1e-3), np.log(1e3), 400))
    of_y = [
        stats.multivariate_normal(cov=np.diag(sigma**2 + tau**2) + 25.0).logpdf(y) for tau in taus
    ]
    weights = softmax(np.array(of_y) + log_prior(taus) + np.log(taus))
    return np.array([weights @ (s**2 / (s**2 + taus**2)) for s in sds])


@pytest.mark.slow("precision", "uniform")
@pytest.mark.parametrize("name", SCALES)
def test_shrinkage_is_that_by_quadrature(name: str, tmp_path: Path) -> None:
    """Of fitted clients, of new ones with one row and two, and of a fit that was saved and loaded."""
    prior, link, log_prior = SCALES[name]
    data, model = hierfl.datasets.eight_schools(), of_scale(prior, link)
    new = hierfl.ClientData.from_clients(
        {
            "one row": {"y": [5.0], "sigma": [12.0]},
            "two rows": {"y": [5.0, 6.0], "sigma": [12.0, 3.0]},
        }
    )
    fit = hierfl.fit(model, data, seed=0)
    fit.save(tmp_path, with_data=True)
    errors = data.fields["sigma"].numpy().astype(float)
    new_errors = np.array([12.0, (12.0**-2 + 3.0**-2) ** -0.5])
    for fitted, sds in (
        (fit, errors),
        (hierfl.load(tmp_path, model=model), errors),
        (fit.personalize(new), new_errors),
    ):
        ours = column(fitted.summary(), "theta", "shrinkage")
        np.testing.assert_allclose(ours, exact_shrinkage(data, log_prior, sds), atol=0.004)


def test_shrinkage_of_a_non_centered_program_is_that_of_the_centered_one() -> None:
    raw = hierfl.fit(schools, hierfl.datasets.eight_schools(), seed=0).summary().frame
    np.testing.assert_allclose(
        raw.query("site == 'e'")["shrinkage"].to_numpy(float),
        of_schools()[1]["shrinkage"].to_numpy(float),
        atol=0.005,
    )
