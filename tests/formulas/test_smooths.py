"""Smooth terms: bases beside scipy's smoothing spline and exact kernels, programs written out, posteriors on grids."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from scipy.integrate import trapezoid
from scipy.interpolate import make_smoothing_spline

import hierfl
from hierfl.effects.averages import averages
from hierfl.effects.conditional_effects import effects
from hierfl.formulas.expressions import Call, Name
from hierfl.formulas.transforms import (
    EDGES,
    BeyondKnots,
    Constants,
    natural_curves,
    smooth_columns,
    smooth_of,
)
from tests.effects.made import drawn, of_program
from tests.formulas.frames import patients
from tests.formulas.test_program import traced, value

Array = np.ndarray[Any, Any]


def made(text: str, family: Any = "gaussian", **options: Any) -> hierfl.Formula:
    return hierfl.formula(text, family, clients="site", **options).on(patients())


# ------------------------------------------------------------ the basis
def test_curves_with_knots_at_all_values_are_the_smoothing_spline() -> None:
    """With u ~ Normal(0, 1 / lambda) the posterior mode is the spline that scipy finds another way."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-3.0, 4.0, 25))
    y = np.sin(x) + rng.normal(0.0, 0.3, 25)
    curves = natural_curves(tuple(x), x)
    grid = np.linspace(x[0], x[-1], 20_001)
    bent = np.gradient(np.gradient(natural_curves(tuple(x), grid), grid, axis=0), grid, axis=0)
    penalty = trapezoid(bent[:, :, None] * bent[:, None], grid, axis=0)
    np.testing.assert_allclose(penalty / penalty[0, 0], np.eye(23), atol=2e-2)
    np.testing.assert_allclose((curves**2).sum() / 25, 1.0)
    np.testing.assert_allclose(np.stack([np.ones(25), x]) @ curves, 0.0, atol=1e-10)
    lam = 0.7
    design = np.column_stack([np.ones(25), x, curves])
    ridge = np.diag([0.0, 0.0, *np.full(23, lam * penalty[10, 10])])
    fitted = design @ np.linalg.solve(design.T @ design + ridge, design.T @ y)
    np.testing.assert_allclose(fitted, make_smoothing_spline(x, y, lam=lam)(x), atol=2e-3)


def test_curves_are_straight_beyond_the_knots() -> None:
    knots = (0.0, 1.0, 1.5, 4.0, 9.0)
    out = natural_curves(knots, np.array([9.0, 10.0, 12.0, 0.0, -1.0, -3.0]))
    np.testing.assert_allclose(out[2] - out[0], 3.0 * (out[1] - out[0]), atol=1e-12)
    np.testing.assert_allclose(out[5] - out[3], 3.0 * (out[4] - out[3]), atol=1e-12)


@pytest.mark.parametrize(("k", "c"), [(20, 2.5), (30, 2.0), (12, 1.6)])
def test_sines_have_the_covariance_of_the_kernel(k: int, c: float) -> None:
    """Within 1.5% of the variance over the length scales that the default prior allows."""
    counts = np.linspace(0.0, 240.0, 241)
    found = smooth_of(Call("gp", (Name("x"),)), (3.0, 2.0), counts, {"k": k, "c": c})
    half = (found.knots[1] - found.knots[0]) / 2.0
    x = np.linspace(found.knots[0], found.knots[1], 60)
    sines = smooth_columns(found, "gp", "gp(x)", x)
    from hierfl.formulas.smooths import length_prior
    from hierfl.formulas.transforms import Smooth

    smooth = Smooth("gp", k, (), found)
    prior: Any = length_prior(smooth)
    ends = stats.invgamma(float(prior.concentration), scale=float(prior.rate)).ppf([0.01, 0.99])
    np.testing.assert_allclose(ends, [1.75 * c * half / k, 0.66 * (c - 1.0) * half], rtol=1e-3)
    centered = np.eye(60) - 1.0 / 60
    for length in np.geomspace(ends[0], ends[1], 7):
        scale = smooth.shape(torch.tensor(length, dtype=torch.float64)).numpy()
        kernel = np.exp(-0.5 * (x[:, None] - x) ** 2 / length**2)
        off = centered @ ((sines * scale**2) @ sines.T - kernel) @ centered
        assert abs(off).max() < 0.015


def test_knots_lie_at_quantiles_and_no_two_at_one_value() -> None:
    rng = np.random.default_rng(1)
    x = np.where(rng.random(2000) < 0.6, 0.0, rng.normal(0.0, 1.0, 2000))
    mean, sd = x.mean(), x.std()
    counts = (x <= mean + sd * EDGES[:, None]).sum(1, dtype=np.float64)
    spline = Call("s", (Name("x"),))
    found = smooth_of(spline, (mean, sd), counts, {"k": 8})
    assert len(found.knots) == 8 and np.diff(found.knots).min() > 0.05 * sd
    even = rng.normal(0.0, 1.0, 4000)
    counts = (even <= EDGES[:, None]).sum(1, dtype=np.float64)
    found = smooth_of(spline, (0.0, 1.0), counts, {"k": 10})
    np.testing.assert_allclose(
        found.knots[1:-1], np.quantile(even, np.linspace(0, 1, 10))[1:-1], atol=0.06
    )


# ------------------------------------------------------------ the program, written out
def _columns_of(formula: hierfl.Formula, name: str, x: Any) -> Array:
    return smooth_columns(
        formula.agreed.transforms[name], name.partition("(")[0], name, np.asarray(x)
    )


def test_the_density_of_a_spline_with_levels_and_groups() -> None:
    text = "y ~ sex + s(age, k=6, by=sex) + (1 + s(dose, k=5) || site)"
    rows, formula = patients(), made(text)
    trace = traced(formula, rows)
    by, own = "s(age, k=6, by=sex)", "s(dose, k=5)"
    age, dose = _columns_of(formula, by, rows["age"]), _columns_of(formula, own, rows["dose"])
    level = rows["sex"].map({"f": 0, "m": 1, "x": 2}).to_numpy()
    lines, curves = value(trace, f"linear_{by}"), value(trace, by).reshape(3, 4)
    sds = value(trace, f"sds_{by}")
    wanted = stats.norm.logpdf(curves, 0.0, sds[:, None]).sum()
    np.testing.assert_allclose(trace.nodes[by]["log_prob"].sum().item(), wanted, rtol=1e-6)
    smooth = age[:, 0] * lines[level] + (age[:, 1:] * curves[level]).sum(1)
    sex = np.concatenate([[0.0], value(trace, "sex")])[level]
    site = rows["site"].str[1:].astype(int).to_numpy()
    deviations = value(trace, "site").reshape(8, 5)
    each = smooth + sex
    eta = deviations[site, 0] + each + (dose * deviations[site, 1:]).sum(1)
    wanted = stats.norm.logpdf(rows["y"], eta, value(trace, "sigma")).sum()
    np.testing.assert_allclose(trace.nodes["y"]["log_prob"].sum().item(), wanted, rtol=1e-6)
    base = value(trace, "Intercept_centered") - each.mean()
    sd = value(trace, "sd_site")
    loc, scale = np.array([float(base), 0, 0, 0, 0]), np.array([sd[0], sd[1], *[sd[2]] * 3])
    wanted = stats.norm.logpdf(deviations, loc, scale).sum()
    np.testing.assert_allclose(trace.nodes["site"]["log_prob"].sum().item(), wanted, rtol=1e-6)


def test_the_density_of_a_process() -> None:
    rows, formula = patients(), made("y ~ gp(age, k=8, c=2) + (0 + gp(dose) || site)")
    trace = traced(formula, rows)
    name = "gp(age, k=8, c=2)"
    low, high = formula.agreed.transforms[name].knots
    boundary, length = high - low, float(value(trace, f"lscale_{name}"))
    waves = np.arange(1, 9) * np.pi / (2 * boundary)
    density = np.sqrt(2 * np.pi) * length * np.exp(-0.5 * (length * waves) ** 2) / boundary
    scale = value(trace, f"sdgp_{name}") * np.sqrt(density + 1e-8)
    wanted = stats.norm.logpdf(value(trace, name), 0.0, scale).sum()
    np.testing.assert_allclose(trace.nodes[name]["log_prob"].sum().item(), wanted, rtol=1e-5)
    sines = np.sin(waves * (rows["age"].to_numpy()[:, None] - (low + high) / 2 + boundary))
    np.testing.assert_allclose(formula.data(rows).fields["x"], sines, atol=1e-5)
    own = value(trace, "lscale_site_gp(dose)")
    assert own.shape == () and value(trace, "site").reshape(8, -1).shape[1] == 20


def test_mgcv_factor_smooths_are_curves_of_groups() -> None:
    one = made("y ~ s(age) + s(age, site, bs='fs', k=5)")
    two = made("y ~ s(age) + (1 + s(age, k=5) || site)")
    assert one.program().split('"""')[2] == two.program().split('"""')[2]
    beside = made('y ~ s(age, site, bs="fs", k=5) + (1 | site)')
    assert [g.group.text for g in beside.layout.groups] == [
        "(1 | site)",
        "(0 + s(age, k=5) || site)",
    ]
    across = made("y ~ s(age, year, bs='fs') + (1 | site)").layout.groups[1]
    assert across.place == "crossed" and across.size == 4


def test_priors_and_their_names() -> None:
    formula = made(
        "y ~ s(age) + gp(dose) + (1 | site)",
        priors={"sds": "normal(0, 1)", "lscale": "gamma(2, 1)", "linear_s(age)": "normal(0, 3)"},
    )
    table = formula.prior_summary().set_index("site")
    assert set(table.index[table["source"] == "user"]) == {
        *("sds_s(age)", "lscale_gp(dose)", "linear_s(age)")
    }
    assert not any(name.startswith("s(age)") for name in table.index)
    with pytest.raises(ValueError, match=r"did you mean 'sds_s\(age\)'"):
        made("y ~ s(age)", priors={"sds_s(ages)": "normal(0, 1)"}).all_priors  # noqa: B018
    spread = patients()["y"].std(ddof=0)
    scale: Any = made("y ~ s(age)").all_priors["sds_s(age)"]
    np.testing.assert_allclose(scale.base_dist.scale, 2.5 * spread, rtol=1e-5)


# ------------------------------------------------------------ answers
TEXTS = [
    "y ~ s(age) + sex + (1 + s(dose, k=4) || site)",
    "count ~ s(age, by=sex, k=5) + gp(dose) + (0 + gp(age, k=12) || year) + (1 | site)",
    "y ~ s(dose, by=age, k=5) + s(age, site, bs='fs', k=5); sigma ~ s(age, k=4) + (1 | site)",
    "y ~ age + (1 | site); sigma ~ (1 + gp(age, k=12) || site)",
    "died ~ s(beds, k=3) + (1 | site) + (1 + s(age, k=5) || site:ward)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_answers_are_those_of_the_program(text: str) -> None:
    from hierfl.effects.predictor import mean_response, parameters_at, predictor
    from hierfl.effects.predictor_rows import rows_of_client
    from tests.effects.made import frame

    family = {"y": "gaussian", "c": "poisson", "d": "bernoulli"}[text[0]]
    found, rows = drawn(text, family, draws=3), frame()
    wanted = of_program(found, rows)
    parts = []
    for client in range(4):
        own = rows_of_client(found.formula, found.data, client)
        eta = predictor(found, own, client)
        parts.append(mean_response(found, eta, parameters_at(found, own, client), own))
    np.testing.assert_allclose(torch.cat(parts, 1), wanted, rtol=2e-4, atol=2e-4)


def test_new_clients_have_the_spread_of_curves() -> None:
    found = drawn("y ~ s(age) + (0 + gp(age) + s(dose, k=5) || site)", draws=250)
    (term,) = found.layout.groups
    new = found.of_new(term)[..., 0]
    length = found.shared["lscale_site_gp(age)"].numpy()
    knots = found.formula.agreed.transforms["gp(age)"].knots
    boundary = 2.5 * (knots[1] - knots[0]) / 2
    sd = found.shared["sd_site"].numpy()
    for j in (1, 3):
        density = np.sqrt(2 * np.pi) * length / boundary
        density = density * np.exp(-0.5 * (length * j * np.pi / (2 * boundary)) ** 2)
        unit = new[:, j - 1].numpy() / (sd[:, 0] * np.sqrt(density + 1e-8))
        assert stats.kstest(unit, "norm").pvalue > 1e-3
    for j, place in ((20, 1), (21, 2), (23, 2)):
        assert stats.kstest(new[:, j].numpy() / sd[:, place], "norm").pvalue > 1e-3


@pytest.mark.filterwarnings("ignore:column 'age' .* more than 8 sds")
def test_values_beyond_are_warned_of_or_refused() -> None:
    rows = patients()
    far = rows.assign(age=rows["age"] + 60.0)
    with pytest.warns(BeyondKnots) as heard:
        made("y ~ s(age)").data(far)
    (own,) = [str(of.message) for of in heard if "'s0'" in str(of.message)]
    assert own.startswith("'s(age)' of client 's0' has 24 values far outside its knots")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made("y ~ s(age)").data(rows)
        made("y ~ gp(age)").data(rows)
    with pytest.warns(BeyondKnots), pytest.raises(ValueError, match="where its sines end"):
        made("y ~ gp(age)").data(rows.assign(age=rows["age"] + 30.0))
        made("y ~ gp(age)").data(rows.assign(age=rows["age"] + 300.0))
    assert isinstance(made("y ~ gp(age)").agreed.transforms["gp(age)"], Constants)
    formula = made("y ~ gp(age) + s(dose, k=5, by=sex)")
    assert hierfl.Schema.of_json(formula.agreed.json()) == formula.agreed


# ------------------------------------------------------------ posteriors
def waved(n: int = 120, seed: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.0, 10.0, n)
    y = np.sin(x) + 0.1 * x + rng.normal(0.0, 0.5, n)
    return pd.DataFrame({"h": np.repeat(list("abcd"), n // 4), "x": x, "y": y})


FLAT = {"Intercept": dist.Normal(0.0, 5.0), "sigma": dist.HalfNormal(1.0)}
GRID = np.linspace(0.5, 9.5, 15)


def on_grid(
    y: Array, kernel: Any, at: Any, cells: list[Array], priors: list[Any]
) -> tuple[Array, Array]:
    """Mean and sd of f at `GRID`: Gaussian given scales, which are summed over a grid of their logs."""
    log_w, means, variances = [], [], []
    for cell in np.stack(np.meshgrid(*cells, indexing="ij"), -1).reshape(-1, len(cells)):
        scales = np.exp(cell)
        k, cross, own = kernel(scales), at(scales)[0], at(scales)[1]
        k = k + scales[-1] ** 2 * np.eye(len(y))
        lower = np.linalg.cholesky(k)
        a = np.linalg.solve(lower, np.column_stack([y, cross.T]))
        log_w.append(
            -0.5 * a[:, 0] @ a[:, 0]
            - np.log(np.diag(lower)).sum()
            + sum(p.logpdf(s) for p, s in zip(priors, scales, strict=True))
            + cell.sum()
        )
        means.append(a[:, 1:].T @ a[:, 0])
        variances.append(own - (a[:, 1:] ** 2).sum(0))
    w = np.exp(np.array(log_w) - np.max(log_w))
    w /= w.sum()
    mean = w @ np.array(means)
    return mean, np.sqrt(w @ (np.array(variances) + (np.array(means) - mean) ** 2))


def of_fit(text: str, rows: pd.DataFrame, priors: dict[str, Any]) -> tuple[Array, Array]:
    formula = hierfl.formula(text, clients="h", priors=priors)
    fit = hierfl.fit(formula, rows, seed=0, progress=False)
    assert "Trustworthy" in fit.summary(draws=200).verdict
    table = effects(fit, "x", grid=list(GRID), scale="link", draws=4000).frame
    return table["mean"].to_numpy(), table["sd"].to_numpy()


def test_the_posterior_of_a_spline_is_that_of_its_scales_on_a_grid() -> None:
    rows = waved()
    priors = FLAT | {"sds": dist.HalfNormal(2.0), "b": dist.Normal(0.0, 3.0)}
    mean, sd = of_fit("y ~ s(x, k=9)", rows, priors)
    knots = hierfl.formula("y ~ s(x, k=9)", clients="h").on(rows).agreed.transforms["s(x, k=9)"]
    x, y = rows["x"].to_numpy(), rows["y"].to_numpy()
    both = np.concatenate([x, GRID])
    curves = natural_curves(knots.knots, both)
    line = (both - x.mean()) / x.std()
    curves, line = curves - curves[:120].mean(0), line - line[:120].mean()

    def whole(scales: Array) -> Array:
        k: Array = 25.0 + 9.0 * np.outer(line, line) + scales[0] ** 2 * curves @ curves.T
        return k

    wanted = on_grid(
        y,
        lambda s: whole(s)[:120, :120],
        lambda s: (whole(s)[120:, :120], np.diag(whole(s))[120:]),
        [np.linspace(-2.5, 2.2, 24), np.log(0.5) + np.linspace(-0.3, 0.4, 12)],
        [stats.halfnorm(scale=2.0), stats.halfnorm(scale=1.0)],
    )
    assert abs(mean - wanted[0]).max() < 0.06 * wanted[1].min()
    np.testing.assert_allclose(sd, wanted[1], rtol=0.06)


def test_averages_set_a_column_of_a_smooth() -> None:
    from hierfl.effects.averages import Intervention
    from tests.effects.made import frame

    found, rows = drawn("y ~ s(age, k=5) + sex + (1 | site)", draws=4), frame()
    by_rows = averages(found, "rows", [Intervention("age", 47.0)], None, "response").draws
    by_frame = averages(found, rows, [Intervention("age", 47.0)], None, "response").draws
    np.testing.assert_allclose(by_rows, by_frame, rtol=1e-5)
