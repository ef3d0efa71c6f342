"""R2 and ICC are closed forms of the draws, and recover known values of simulated data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hierfl.effects.predictor_rows import rows_of_client
from hierfl.effects.variance import icc, r2
from tests.effects.made import drawn, frame, repeated, with_shared


def test_r2_of_a_linear_model_is_a_share_of_variance() -> None:
    found = with_shared(drawn("y ~ dose + (1 | site)"), Intercept=0.0, dose=2.0, sigma=1.5)
    means = torch.tensor([-1.0, 0.0, 2.0, 5.0]).double().expand(found.count, 4)
    object.__setattr__(found, "own", {"site": means})
    rows = frame().set_index("site").loc[list(found.clients)]
    fixed = 2.0 * rows["dose"].to_numpy()
    mu = fixed + np.repeat(means[0].numpy(), [(rows.index == c).sum() for c in found.clients])
    table = r2(found).frame
    total = mu.var() + 1.5**2
    np.testing.assert_allclose(table["mean"], [mu.var() / total, fixed.var() / total], rtol=1e-5)


def test_r2_of_counts_has_the_variance_of_the_counts() -> None:
    found = drawn("count ~ dose + (1 | site)", "poisson")
    mus = []
    for k in range(4):
        x = rows_of_client(found.formula, found.data, k).common[:, 0]
        eta = found.own["site"][:, k, None] + found.shared["dose"][:, None] * x
        mus.append(np.exp(eta.numpy()))
    mu = np.concatenate(mus, 1)
    wanted = mu.var(1) / (mu.var(1) + mu.mean(1))
    found_ = r2(found).frame.loc["conditional"]
    np.testing.assert_allclose(found_["mean"], wanted.mean(), rtol=1e-6)
    np.testing.assert_allclose(found_["low"], np.quantile(wanted, 0.05), rtol=1e-6)


def test_binomial_r2_counts_trials_and_categories_are_refused() -> None:
    table = r2(drawn("k | trials(n) ~ dose + (1 | site)", "binomial")).frame
    assert table["mean"].between(0.0, 1.0).all()
    for family in ("categorical", "cumulative"):
        with pytest.raises(ValueError, match=f"a response of {family} is in categories"):
            r2(drawn("grade ~ dose + (1 | site)", family, draws=2))


CASES: list[tuple[str, str, Mapping[str, float], float]] = [
    ("y ~ dose + (1 | site)", "gaussian", {"sigma": 1.5}, 1.5**2),
    ("y ~ dose + (1 | site)", "student", {"sigma": 1.5, "nu": 5.0}, 1.5**2 * 5 / 3),
    ("died ~ dose + (1 | site)", "bernoulli", {}, np.pi**2 / 3),
    ("k | trials(n) ~ dose + (1 | site)", "binomial", {}, np.pi**2 / 3),
    ("grade ~ dose + (1 | site)", "cumulative", {}, np.pi**2 / 3),
    ("time ~ dose + (1 | site)", "exponential", {}, np.pi**2 / 6),
    ("time ~ dose + (1 | site)", "weibull", {"shape": 2.0}, np.pi**2 / 24),
    ("time ~ dose + (1 | site)", "lognormal", {"sigma": 0.5}, 0.25),
    ("time ~ dose + (1 | site)", "gamma", {"shape": 2.0}, np.log(1.5)),
    ("count ~ dose + (1 | site)", "poisson", {}, np.log1p(1 / np.exp(1.0 + 0.32))),
    ("count ~ dose + (1 | site)", "negative_binomial", {"shape": 2.0}, np.log1p(1 / np.exp(1.0 + 0.32) + 0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "family", "values", "left"), CASES, ids=[f for _, f, *_ in CASES])
def test_icc_is_the_share_of_the_groups(
    text: str, family: str, values: Mapping[str, float], left: float
) -> None:
    found = drawn(text, family, draws=2)
    start: dict[str, Any] = {"Intercept": 1.0} if found.layout.has_intercept else {}
    found = with_shared(found, sd_site=0.8, **start, **values)
    table = icc(found).frame
    np.testing.assert_allclose(table["mean"]["site"], 0.64 / (0.64 + left), rtol=1e-6)
    np.testing.assert_allclose(table["mean"].sum(), 1.0)


# family -> how far off the variance of a log-normal is, which stands for that of counts and amounts
SIMULATED = {"exponential": 0.01, "weibull": 0.01, "poisson": 0.06, "gamma": 0.06}


@pytest.mark.parametrize("family", SIMULATED)
def test_icc_is_that_of_logarithms_of_simulated_responses(family: str) -> None:
    rng, size = np.random.default_rng(0), 200_000
    text = "count ~ dose + (1 | site)" if family == "poisson" else "time ~ dose + (1 | site)"
    found = with_shared(drawn(text, family, draws=2), sd_site=0.8, Intercept=3.0)
    if "shape" in found.shared:
        found = with_shared(found, shape=4.0)
    share = icc(found).frame["mean"]["site"]
    mean = np.exp(3.0 + 0.8 * rng.standard_normal(size))
    if family == "poisson":
        y = rng.poisson(mean).astype(float)
    elif family == "gamma":
        y = rng.gamma(4.0, mean / 4.0)
    elif family == "weibull":
        y = mean * rng.weibull(4.0, size)
    else:
        y = rng.exponential(mean)
    positive = y > 0
    wanted = np.corrcoef(np.log(mean[positive]), np.log(y[positive]))[0, 1] ** 2
    np.testing.assert_allclose(share, wanted, atol=SIMULATED[family])


def test_several_groups_and_slopes() -> None:
    found = drawn("y ~ dose + (1 + dose | site) + (1 | site:ward) + (1 | year)", draws=2)
    correlation = torch.tensor([[1.0, -0.5], [-0.5, 1.0]]).double()
    found = with_shared(
        found,
        sd_site=[2.0, 1.0],
        L_site=torch.linalg.cholesky(correlation),
        **{"sd_site:ward": 0.5, "sd_year": 0.25, "sigma": 1.0},
    )
    table = icc(found, at={"dose": 2.0}).frame["mean"]
    site = 4.0 + 4.0 + 2 * 2.0 * (-0.5 * 2.0)
    total = site + 0.25 + 0.0625 + 1.0
    assert list(table.index) == ["site", "site:ward", "year", "residual"]
    np.testing.assert_allclose(table, np.array([site, 0.25, 0.0625, 1.0]) / total, rtol=1e-6)
    assert icc(repeated(found, 5)).frame["sd"].max() < 1e-9


def test_what_has_no_icc_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the formula has no groups: add some, such as \(1 \| site\)"
    ):
        icc(drawn("y ~ dose", draws=2))
    for text, family in (
        ("grade ~ dose + (1 | site)", "categorical"),
        ("count ~ dose + (1 | site)", "zero_inflated_poisson"),
    ):
        with pytest.raises(ValueError, match=f"family {family} with link .* has no agreed latent"):
            icc(drawn(text, family, draws=2))
