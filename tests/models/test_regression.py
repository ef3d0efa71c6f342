"""Regressions: densities by hand, parameters that vary or are known, and errors."""

from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.special import expit, logsumexp
from scipy.stats import bernoulli, halfcauchy, poisson
from scipy.stats import t as student

from hierfl import ClientData, guides, models, read
from tests.models.scene import (
    Arrays,
    check_every_engine,
    densities,
    everyone,
    half_normal,
    normal,
    numbers,
    rows_of,
    values_at_random,
)

LOCAL = {"intercept", "slope", "log_sigma"}
MODELS: dict[str, Any] = {
    "gaussian": models.regression(centered=True),
    "varying": models.regression(centered=True, varying="sigma"),
    "bernoulli": models.regression("bernoulli", y="ill", centered=True),
    "categorical": models.regression("categorical", y="kind", num_classes=3, centered=True),
    "poisson": models.regression("poisson", y="visits", exposure="years", centered=True),
}


def likelihood_by_hand(name: str, rows: Arrays, v: Arrays) -> float:
    eta = v["intercept"] + rows["x"] @ v["slope"]
    if name == "bernoulli":
        return float(bernoulli.logpmf(rows["ill"], expit(eta)).sum())
    if name == "categorical":
        return float((eta[np.arange(len(eta)), rows["kind"]] - logsumexp(eta, axis=1)).sum())
    if name == "poisson":
        return float(poisson.logpmf(rows["visits"], rows["years"] * np.exp(eta)).sum())
    if name == "gaussian":
        return normal(rows["y"], eta, v["sigma"])
    varied = normal(v["log_sigma"], np.log(v["sigma"]), v["sigma_spread"])
    return normal(rows["y"], eta, np.exp(v["log_sigma"])) + varied


@pytest.mark.parametrize("name", MODELS)
def test_density_by_hand(name: str, data: ClientData) -> None:
    program = read(MODELS[name], guides.mean_field, data)
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    for k in range(3):
        v = numbers(values, k, LOCAL)
        by_hand = likelihood_by_hand(name, rows_of(data, k), v)
        by_hand += sum(normal(v[w], v[f"{w}_loc"], v[f"{w}_scale"]) for w in ("intercept", "slope"))
        assert own[k].item() == pytest.approx(by_hand)


def test_default_priors_of_noise_are_those_of_formulas(data: ClientData) -> None:
    program = read(MODELS["varying"], guides.mean_field, data)
    values = values_at_random(program)
    v = numbers(values, 0, LOCAL)
    by_hand = sum(
        normal(v[f"{w}_loc"], 0.0, 2.5) + half_normal(v[f"{w}_scale"])
        for w in ("intercept", "slope")
    )
    by_hand += np.log(2.0) + student.logpdf(v["sigma"], 3.0, 0.0, 2.5)
    by_hand += half_normal(v["sigma_spread"], 0.5)
    assert densities(program, values, everyone(data))[1].item() == pytest.approx(by_hand)


def test_eight_schools(data: ClientData) -> None:
    priors: dict[str, Any] = {
        "prior_loc": dist.Normal(0.0, 5.0),
        "prior_scale": dist.HalfCauchy(5.0),
    }
    model = models.regression(x=None, priors={"sigma": "years"}, **priors)
    program = read(model, guides.mean_field, data)
    names = ["intercept_loc", "intercept_scale", "intercept_offset"]
    assert [site.name for site in program.latents.sites] == names
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    rows, v = rows_of(data, 0), numbers(values, 0, {"intercept_offset"})
    effect = v["intercept_loc"] + v["intercept_scale"] * v["intercept_offset"]
    assert own[0].item() == pytest.approx(
        normal(rows["y"], effect, rows["years"]) + normal(v["intercept_offset"], 0.0, 1.0)
    )
    above = halfcauchy.logpdf(v["intercept_scale"], scale=5.0)
    above += normal(v["intercept_loc"], 0.0, 5.0)
    assert densities(program, values, everyone(data))[1].item() == pytest.approx(above)


def test_known_noise_makes_no_site(data: ClientData) -> None:
    model = models.regression(priors={"sigma": 2.0}, slopes="global", intercept="global")
    program = read(model, guides.delta, data)
    values = values_at_random(program)
    assert set(values) == {"slope", "intercept"}
    own = densities(program, values, everyone(data))[0]
    rows, v = rows_of(data, 2), numbers(values, 2, set())
    assert own[2].item() == pytest.approx(
        normal(rows["y"], v["intercept"] + rows["x"] @ v["slope"], 2.0)
    )


def test_thresholds_take_the_place_of_a_common_intercept(data: ClientData) -> None:
    model = models.regression("ordinal", y="kind", num_classes=3, centered=True)
    program = read(model, guides.delta, data)
    values = values_at_random(program)
    assert "intercept_loc" not in values and values["thresholds"].shape == (2,)
    own = check_every_engine(program, data, values)
    rows, v = rows_of(data, 1), numbers(values, 1, {"intercept", "slope"})
    below = expit(v["thresholds"] - (v["intercept"] + rows["x"] @ v["slope"])[:, None])
    cdf = np.concatenate([np.zeros((3, 1)), below, np.ones((3, 1))], 1)
    by_hand = np.log(cdf[np.arange(3), rows["kind"] + 1] - cdf[np.arange(3), rows["kind"]]).sum()
    by_hand += normal(v["intercept"], 0.0, v["intercept_scale"])
    assert own[1].item() == pytest.approx(
        by_hand + normal(v["slope"], v["slope_loc"], v["slope_scale"])
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_binary_labels_of_any_dtype(dtype: torch.dtype, data: ClientData) -> None:
    program = read(MODELS["bernoulli"], guides.delta, data)
    values = values_at_random(program)
    other = data.with_fields(ill=data.fields["ill"].to(dtype))
    torch.testing.assert_close(
        check_every_engine(program, other, values), check_every_engine(program, data, values)
    )


ORDINAL = {"family": "ordinal", "num_classes": 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"family": "gausian"}, "which hierfl does not have: use 'gaussian'"),
    ({"family": "softmax"}, "'categorical' needs the number of classes: give num_classes="),
    ({"family": "softmax", "num_classes": 1}, "num_classes is 1: it must be in "),
    ({"num_classes": 3}, "num_classes is 3, but family 'gaussian' has no classes: leave it out"),
    ({"family": "binomial"}, "'binomial' needs the row field 'trials': add it"),
    ({"trials": "n"}, "'gaussian' takes no row fields, not 'trials': leave it out"),
    ({"exposure": "years"}, "exposure is 'years', but family 'gaussian' has the link 'identity'"),
    ({"varying": "shape"}, "varying has 'shape', but family 'gaussian' has 'sigma'"),
    ({"family": "poisson", "varying": ("sigma",)}, "'poisson' has no positive parameter"),
    ({"family": "zip", "varying": "zi"}, "'zero_inflated_poisson' has no positive parameter"),
    ({"priors": {"noise": 1.0}}, "priors has 'noise', but family 'gaussian' has 'sigma'"),
    (
        {"varying": "sigma", "priors": {"sigma": "years"}},
        "'sigma' is the field 'years', .* varying",
    ),
    ({"varying": "sigma", "priors": {"sigma_spread": "years"}}, "'sigma_spread' is not one number"),
    ({**ORDINAL, "priors": {"thresholds": "years"}}, "'thresholds' is not one number a row: give"),
    ({"priors": {"sigma": -1.0}}, "sigma is -1.0, but a scale must be > 0"),
    ({"varying": "sigma", "priors": {"sigma_spread": dist.Normal(0, 1)}}, "sigma_spread is Normal"),
    ({**ORDINAL, "intercept": "global"}, "'cumulative' has 'thresholds' in place of a common"),
    ({**ORDINAL, "intercept_loc": 1.0}, "leave out intercept_loc"),
]


def test_invalid_options_raise_when_it_is_built() -> None:
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            models.regression(**options)


def test_label_out_of_range_raises(data: ClientData) -> None:
    with pytest.raises(ValueError, match=r"field 'kind' of client '.*' has the value 2, outside"):
        read(models.regression("categorical", y="kind", num_classes=2), guides.delta, data)
