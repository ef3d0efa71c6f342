"""Linear regression: densities by hand, global, varying and known noise, and errors."""

from __future__ import annotations

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from hierfl import guides, models
from hierfl.data.clients import ClientData
from hierfl.program.read import read
from tests.models.scene import (
    check_every_engine,
    densities,
    everyone,
    half_normal,
    normal,
    numbers,
    rows_of,
    values_at_random,
)

LOCAL = {"intercept", "slope", "log_noise"}


@pytest.mark.parametrize("noise", ["global", "varying"])
def test_density_by_hand(noise: str, data: ClientData) -> None:
    program = read(models.linear(noise=noise, centered=True), guides.mean_field, data)  # type: ignore[arg-type]
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    for k in range(3):
        rows, v = rows_of(data, k), numbers(values, k, LOCAL)
        sigma = np.exp(v["log_noise"]) if noise == "varying" else v["noise_scale"]
        by_hand = normal(rows["y"], v["intercept"] + rows["x"] @ v["slope"], sigma)
        by_hand += sum(normal(v[w], v[f"{w}_loc"], v[f"{w}_scale"]) for w in ("intercept", "slope"))
        if noise == "varying":
            by_hand += normal(v["log_noise"], np.log(v["noise_scale"]), v["noise_spread"])
        assert own[k].item() == pytest.approx(by_hand)
    above = densities(program, values, everyone(data))[1].item()
    by_hand = sum(
        normal(v[f"{w}_loc"], 0.0, 2.5) + half_normal(v[f"{w}_scale"])
        for w in ("intercept", "slope")
    )
    by_hand += half_normal(v["noise_scale"]) + (
        half_normal(v["noise_spread"], 0.5) if noise == "varying" else 0.0
    )
    assert above == pytest.approx(by_hand)


def test_eight_schools(data: ClientData) -> None:
    model = models.linear(
        x=None,
        noise_scale="years",
        prior_loc=dist.Normal(0.0, 5.0),
        prior_scale=dist.HalfCauchy(5.0),
    )
    program = read(model, guides.mean_field, data)
    assert [site.name for site in program.latents.sites] == [
        "intercept_loc",
        "intercept_scale",
        "intercept_offset",
    ]
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    rows, v = rows_of(data, 0), numbers(values, 0, {"intercept_offset"})
    effect = v["intercept_loc"] + v["intercept_scale"] * v["intercept_offset"]
    assert own[0].item() == pytest.approx(
        normal(rows["y"], effect, rows["years"]) + normal(v["intercept_offset"], 0.0, 1.0)
    )


def test_known_noise_makes_no_site(data: ClientData) -> None:
    program = read(
        models.linear(noise_scale=2.0, slopes="global", intercept="global"), guides.delta, data
    )
    values = values_at_random(program)
    assert set(values) == {"slope", "intercept"}
    own = densities(program, values, everyone(data))[0]
    rows, v = rows_of(data, 2), numbers(values, 2, set())
    assert own[2].item() == pytest.approx(
        normal(rows["y"], v["intercept"] + rows["x"] @ v["slope"], 2.0)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "none"}, "noise is 'none': it must be 'global' or 'varying'"),
        (
            {"noise": "varying", "noise_scale": "years"},
            "noise_scale is the field 'years', .*: it cannot be combined with noise='varying'",
        ),
        ({"noise_scale": -1.0}, "noise_scale is -1.0, but a scale must be > 0"),
        ({"noise_spread": dist.Normal(0.0, 1.0)}, "noise_spread is Normal"),
    ],
)
def test_invalid_noise_raises(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.linear(**options)  # type: ignore[arg-type]


def test_float32_by_default(data: ClientData) -> None:
    torch.set_default_dtype(torch.float32)
    narrow = data.with_fields(x=data.fields["x"].float(), y=data.fields["y"].float())
    program = read(models.linear(), guides.delta, narrow)
    own, above = densities(program, values_at_random(program), everyone(narrow))
    assert own.dtype == above.dtype == torch.float32
