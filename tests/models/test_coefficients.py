"""Shared by the regressions: local and global coefficients, both parametrizations, priors and errors."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from hierfl import ClientData, ProgramError, guides, models, read
from tests.models.scene import (
    check_every_engine,
    densities,
    everyone,
    half_normal,
    normal,
    numbers,
    values_at_random,
)

REGRESSIONS: list[dict[str, Any]] = [
    {},
    {"varying": "sigma"},
    {"priors": {"sigma": "years"}, "x": "one"},
    {"family": "bernoulli", "y": "ill"},
    {"family": "categorical", "num_classes": 3, "y": "kind"},
    {"family": "poisson", "y": "visits", "exposure": "years"},
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"centered": True},
    {"slopes": "global"},
    {"intercept": "global", "centered": True},
    {"intercept": None},
    {"x": None},
    {"intercept": "global", "slopes": "global"},
]


@pytest.mark.parametrize("own", REGRESSIONS, ids=str)
def test_every_engine_agrees(own: dict[str, Any], data: ClientData) -> None:
    """In all shapes with one predictor and with several; others differ in what they do with them."""
    for options in SHAPES if own in (REGRESSIONS[0], REGRESSIONS[4]) else SHAPES[:1]:
        program = read(models.regression(**{**own, **options}), guides.mean_field, data)
        label = own.get("y", "y")
        assert program.labels[label] == label, options
        density = check_every_engine(program, data, values_at_random(program))
        assert density.isfinite().all(), options


@pytest.mark.parametrize("own", REGRESSIONS, ids=str)
def test_non_centered_models_have_the_same_density(own: dict[str, Any], data: ClientData) -> None:
    centered, offset = (
        read(models.regression(**own, centered=c), guides.delta, data) for c in (True, False)
    )
    values = values_at_random(centered)
    moved, jacobian = dict(values), torch.zeros(3)
    for w in [site.name for site in centered.latents.local_block.sites]:
        loc, scale = (
            (values["sigma"].log(), values["sigma_spread"])
            if w == "log_sigma"
            else (values[f"{w}_loc"], values[f"{w}_scale"])
        )
        value = moved.pop(w)
        moved[f"{w}_offset"] = (value - loc) / scale
        jacobian = jacobian + scale.log().expand(value.shape).flatten(1).sum(1)
    batch = everyone(data)
    (in_w, above), (in_z, same) = (
        densities(centered, values, batch),
        densities(offset, moved, batch),
    )
    torch.testing.assert_close(in_z - jacobian, in_w)
    torch.testing.assert_close(same, above)


def test_default_priors_and_deterministic_slope(data: ClientData) -> None:
    program = read(models.regression("bernoulli", y="ill"), guides.delta, data)
    assert {site.name: tuple(site.start.shape) for site in program.latents.global_block.sites} == {
        **{"slope_loc": (2,), "slope_scale": (2,)},
        **{"intercept_loc": (), "intercept_scale": ()},
    }
    own = {site.name: tuple(site.start.shape) for site in program.latents.local_block.sites}
    assert own == {"intercept_offset": (1, 1), "slope_offset": (1, 1, 2)}
    values = values_at_random(program)
    v = numbers(values, 0, set())
    by_hand = sum(
        normal(v[f"{w}_loc"], 0.0, 2.5) + half_normal(v[f"{w}_scale"])
        for w in ("slope", "intercept")
    )
    assert densities(program, values, everyone(data))[1].item() == pytest.approx(by_hand)
    with pyro.poutine.trace() as seen, pyro.poutine.condition(data=values):
        program.model(everyone(data))
    slope = seen.trace.nodes["slope"]["value"]
    assert slope is not None and slope.shape == (3, 1, 2)
    moved = values["slope_loc"] + values["slope_scale"] * values["slope_offset"]
    torch.testing.assert_close(slope, moved)


def test_priors_as_arguments(data: ClientData) -> None:
    per_feature = dist.Normal(torch.tensor([1.0, -1.0]), 0.5)
    model = models.regression(
        prior_loc=per_feature,
        prior_scale=dist.LogNormal(-1.0, 0.7),
        intercept_loc=dist.Normal(3.0, 5.0),
        intercept_scale=dist.HalfCauchy(5.0),
        priors={"sigma": 0.7},
        centered=True,
    )
    program = read(model, guides.mean_field, data)
    values = values_at_random(program)
    by_hand = (
        per_feature.log_prob(values["slope_loc"]).sum()
        + dist.LogNormal(-1.0, 0.7).log_prob(values["slope_scale"]).sum()
        + dist.Normal(3.0, 5.0).log_prob(values["intercept_loc"])
        + dist.HalfCauchy(5.0).log_prob(values["intercept_scale"])
    )
    torch.testing.assert_close(densities(program, values, everyone(data))[1], by_hand)


def test_correlated_prior_and_known_values(data: ClientData) -> None:
    joint = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.8], [0.8, 1.0]]))
    known: dict[str, Any] = {
        "prior_scale": torch.tensor([0.5, 2.0]),
        "intercept_loc": 0.0,
        "intercept_scale": 1.5,
        "priors": {"sigma": 1.0},
    }
    program = read(
        models.regression(prior_loc=joint, centered=True, **known), guides.mean_field, data
    )
    values = values_at_random(program)
    assert {site.name for site in program.latents.sites} == {"slope_loc", "slope", "intercept"}
    own, above = densities(program, values, everyone(data))
    torch.testing.assert_close(above, joint.log_prob(values["slope_loc"]))
    rows, v = data.select([1]).fields, numbers(values, 1, {"slope", "intercept"})
    x, y = rows["x"].numpy(), rows["y"].numpy()
    by_hand = normal(y, v["intercept"] + x @ v["slope"], 1.0) + normal(v["intercept"], 0.0, 1.5)
    assert own[1].item() == pytest.approx(
        by_hand + normal(v["slope"], v["slope_loc"], np.array([0.5, 2.0]))
    )


def test_client_fields_and_integer_features(data: ClientData) -> None:
    program = read(
        models.regression(x="region", slopes="global", centered=True), guides.delta, data
    )
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    v, rows = numbers(values, 2, {"intercept"}), data.select([2])
    loc = v["intercept"] + rows.client_fields["region"][0].numpy() @ v["slope"]
    by_hand = normal(rows.fields["y"].numpy(), loc, v["sigma"]) + normal(
        v["intercept"], v["intercept_loc"], v["intercept_scale"]
    )
    assert own[2].item() == pytest.approx(by_hand)
    counted = read(models.regression(x="kind", centered=True), guides.delta, data)
    assert check_every_engine(counted, data, values_at_random(counted)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slopes": "random"}, "slopes is 'random': it must be one of 'varying', 'global'"),
        ({"intercept": "fixed"}, "intercept is 'fixed': it must be one of 'varying', 'global'"),
        ({"x": None, "intercept": None}, "x and intercept are both None"),
        ({"prior_scale": dist.Normal(0.0, 1.0)}, "Normal.*, but a scale must be > 0: use a Half"),
        ({"intercept_scale": 0.0}, "intercept_scale is 0.0, but a scale must be > 0"),
        (
            {"prior_scale": torch.distributions.HalfNormal(1.0)},
            r"torch distribution, not Pyro's: use pyro\.distributions",
        ),
    ],
)
def test_invalid_options_raise_when_it_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        models.regression("bernoulli", **options)


def wide(size: int) -> Any:
    return dist.Normal(torch.zeros(size), 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_loc": wide(3)}, r"prior of 'slope_loc' has shape \(3,\): .* or have shape \(2,\)"),
        (
            {"prior_loc": wide(2)},
            r"prior of 'intercept_loc' has shape \(2,\): .* or have shape \(\)",
        ),
        ({"x": "picture"}, r"'picture' has shape \(1, 4, 4\) per row: a regression needs a vector"),
        ({"y": "x"}, r"shape \(2,\) per row, but its likelihood \(Bernoulli\) needs \(\)"),
        ({"x": "nothing"}, "the data have no field 'nothing'; they have"),
    ],
)
def test_invalid_shapes_raise_at_reading(
    options: dict[str, Any], message: str, data: ClientData
) -> None:
    with pytest.raises(ProgramError, match=message):
        read(models.regression("bernoulli", **{"y": "ill", **options}), guides.delta, data)
