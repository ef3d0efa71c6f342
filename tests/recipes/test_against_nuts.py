"""Each recipe of examples/recipes agrees with pooled NUTS, as `benchmarks.recipe_nuts` ran and stored it.

Every test compares the fit with `recipe_nuts.json`; a slow one runs NUTS of a recipe again, and compares
that with the file.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hierfl
from benchmarks import pooled_nuts
from benchmarks import recipe_nuts as reference
from hierfl.posterior.draws import posterior_draws

STORED: dict[str, Any] = json.loads(reference.STORED.read_text())
ON_FILES = {"frailty", "missing_covariates", "missing_covariates:imputed", "three_levels"}
SLOW = {  # fits of more than 10 s of a core
    "autoregression",
    "gaussian_process",
    "group_level_predictor",
    "horseshoe",
    "measurement_error",
    "missing_covariates",
    "missing_covariates:imputed",
    "ordinal",
    "three_levels",
    "two_kinds_of_clients",
}
MOST_ERROR = 0.05  # of NUTS itself, in posterior sds
MOST_OFF, LEAST_SD, MOST_SD = 0.1, 0.9, 1.1
TAILS = {  # recipe -> the least and the largest ratio of sds, where tails make sds hard to estimate
    # One client alone in its region has a likelihood with a flat side.
    "three_levels": (0.82, MOST_SD),
    # The logarithm of a half-Cauchy: a kurtosis of 7.5, so a tenth of the draws makes half of the
    # sd.
    "horseshoe": (LEAST_SD, 1.2),
}
# One of 20 people is judged to conflict, at p = 0.006: 1 in 100 such data sets has one by chance.
MARKS = {"autoregression": [pytest.mark.filterwarnings("ignore:client 'person 8' conflicts")]}
RECIPES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW) + MARKS.get(name, []))
    for name in sorted(STORED)
]


def test_every_recipe_has_a_reference() -> None:
    scripts = {path.stem for path in (reference.ROOT / "examples" / "recipes").glob("*.py")}
    assert {name.partition(":")[0] for name in STORED} == scripts


def test_the_references_are_long_enough() -> None:
    for name, sites in STORED.items():
        assert max(site["error"] for site in sites.values()) < MOST_ERROR, name
        assert max(site["r_hat"] for site in sites.values()) < 1.02, name


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_fit_agrees_with_nuts(name: str) -> None:
    if name in ON_FILES and not Path(os.environ.get("HIERFL_DATA", "nowhere")).is_dir():
        pytest.skip("HIERFL_DATA is not set, and the reference is of its data")
    file, _, model = name.partition(":")
    recipe = reference.recipe(file)
    fit = hierfl.fit(getattr(recipe, model or "model"), recipe.data(), seed=0)
    assert fit.method.name == "two_stage"
    drawn = posterior_draws(fit, draws=8000, seed=0)
    values = reference.on_their_scales(name, {**drawn.shared, **drawn.own})
    means = {n: v.mean(0).flatten().numpy() for n, v in values.items()}
    sds = {n: v.std(0).flatten().numpy() for n, v in values.items()}
    least, most = TAILS.get(name, (LEAST_SD, MOST_SD))
    assert set(means) == set(STORED[name])
    for site, nuts in STORED[name].items():
        off = np.abs(means[site] - nuts["mean"]) / nuts["sd"]
        ratio = sds[site] / nuts["sd"]
        assert off.max() < MOST_OFF, f"{site}: a mean is {off.max():.3f} sd off"
        assert ratio.min() > least and ratio.max() < most, f"{site}: sds {ratio}"


@pytest.mark.slow
def test_missing_values_are_those_that_nuts_sampled(data_files: Path) -> None:
    """`fit.imputed` of a formula with mi(), beside the recipe that samples every missing value."""
    recipe = reference.recipe("missing_covariates")
    rows = recipe.patients(data_files / "lung.csv")
    priors = {
        "Intercept": "normal(0, 1)",
        "mi(x)": "normal(0, 1)",
        "sd_institution": "normal(0, 0.5)",
        "sigma": "normal(0, 2)",
        "x_Intercept": "normal(0, 1)",
        "sigma_x": "normal(0, 2)",
    }
    texts = ["y ~ mi(x) + (1 | institution)", "x | mi() ~ 1"]
    formula = hierfl.formula(texts, clients="institution", priors=priors)
    found = hierfl.fit(formula, rows, seed=0).imputed(draws=8000).frame
    nuts = {n: np.array(STORED["missing_covariates:imputed"]["missing"][n]) for n in ("mean", "sd")}
    clients = sorted(rows["institution"].unique())
    place = found.groupby("client").cumcount() + 6 * found["client"].map(clients.index)
    assert len(found) == rows["x"].isna().sum()
    off = np.abs(found["mean"] - nuts["mean"][place]) / nuts["sd"][place]
    ratio = found["sd"] / nuts["sd"][place]
    print(f"means {off.max():.3f} sd off, sds {ratio.min():.3f} to {ratio.max():.3f}")
    assert off.max() < MOST_OFF and ratio.min() > LEAST_SD and ratio.max() < MOST_SD


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile's own
@pytest.mark.parametrize("name", sorted(STORED))
def test_the_stored_reference_is_that_of_nuts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = reference.DRAWS // 4
    if name in ON_FILES and not Path(os.environ.get("HIERFL_DATA", "nowhere")).is_dir():
        pytest.skip("HIERFL_DATA is not set, and the reference is of its data")
    if name in reference.IN_NUMPYRO and not pooled_nuts.has_numpyro():
        pytest.skip(f"{pooled_nuts.VARIABLE} is not set: a Python that has NumPyro")
    monkeypatch.setattr(reference, "DRAWS", fewer)
    again = reference.run(name)
    for site, nuts in STORED[name].items():
        off = np.abs(np.array(again[site]["mean"]) - nuts["mean"]) / nuts["sd"]
        # errors of the reference and of a quarter as many draws
        assert off.max() < 5.0 * (1.0 + 4.0) ** 0.5 * MOST_ERROR, f"{site}: {off.max():.3f} sd"
