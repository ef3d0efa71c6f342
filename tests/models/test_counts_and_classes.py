"""Logistic, softmax and Poisson regression: densities by hand, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp
from scipy.stats import bernoulli, poisson

from hierfl import guides, models
from hierfl.data.clients import ClientData
from hierfl.program.read import read
from hierfl.program.sites import Model
from tests.models.scene import (
    Arrays,
    check_every_engine,
    normal,
    numbers,
    rows_of,
    values_at_random,
)


def by_hand(name: str, rows: Arrays, v: Arrays) -> float:
    eta = v["intercept"] + rows["x"] @ v["slope"]
    if name == "logistic":
        likelihood = bernoulli.logpmf(rows["ill"], expit(eta)).sum()
    elif name == "softmax":
        likelihood = (eta[np.arange(len(eta)), rows["kind"]] - logsumexp(eta, axis=1)).sum()
    else:
        likelihood = poisson.logpmf(rows["visits"], rows["years"] * np.exp(eta)).sum()
    return float(likelihood) + sum(
        normal(v[w], v[f"{w}_loc"], v[f"{w}_scale"]) for w in ("intercept", "slope")
    )


MODELS: dict[str, Model] = {
    "logistic": models.logistic(y="ill", centered=True),
    "softmax": models.softmax(3, y="kind", centered=True),
    "poisson": models.poisson(y="visits", exposure="years", centered=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_density_by_hand(name: str, data: ClientData) -> None:
    program = read(MODELS[name], guides.mean_field, data)
    values = values_at_random(program)
    own = check_every_engine(program, data, values)
    for k in range(3):
        assert own[k].item() == pytest.approx(
            by_hand(name, rows_of(data, k), numbers(values, k, {"intercept", "slope"}))
        )


def test_softmax_is_invariant_under_permutation_of_classes(data: ClientData) -> None:
    program = read(models.softmax(3, y="kind", centered=True), guides.delta, data)
    assert {s.name: tuple(s.event_shape) for s in program.latents.local_block.sites} == {
        "intercept": (3,),
        "slope": (2, 3),
    }
    values, order = values_at_random(program), torch.tensor([1, 2, 0])
    renamed = data.with_fields(kind=order.argsort()[data.fields["kind"]])
    permuted = {name: value[..., order] for name, value in values.items()}
    torch.testing.assert_close(
        check_every_engine(program, data, values), check_every_engine(program, renamed, permuted)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_logistic_accepts_labels_of_any_dtype(dtype: torch.dtype, data: ClientData) -> None:
    program = read(MODELS["logistic"], guides.delta, data)
    values = values_at_random(program)
    other = data.with_fields(ill=data.fields["ill"].to(dtype))
    torch.testing.assert_close(
        check_every_engine(program, other, values), check_every_engine(program, data, values)
    )


def test_label_out_of_range_raises(data: ClientData) -> None:
    with pytest.raises(
        ValueError, match=r"field 'kind' of client '.*' has the value 2, outside the support"
    ):
        read(models.softmax(2, y="kind"), guides.delta, data)


def test_single_class_raises() -> None:
    with pytest.raises(ValueError, match="num_classes is 1: it must be 2 or more"):
        models.softmax(1)
