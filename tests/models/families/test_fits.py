"""Every family in a program: checked, fitted, predicted and drawn from by hierfl; two_stage finds the truth."""

from typing import Any

import numpy as np
import pytest
import torch

import hierfl
from benchmarks.family_programs import (
    LEVELS,
    NAMES,
    additions_of,
    drawn,
    family_of,
    program,
    response_of,
)
from hierfl import guides
from hierfl.methods import fedsvi, two_stage
from hierfl.models import regression
from tests.programs import fit

# with seed 3 an ordinal level has no rows, and two_stage ends without a final posterior, which it
# says
SEEDS = {"cumulative": 4}


@pytest.mark.parametrize("name", NAMES)
def test_a_regression_is_fitted_predicts_and_draws(name: str) -> None:
    family, data = family_of(name), drawn(name, 1, clients=3, rows=5)[1]
    columns: dict[str, Any] = {addition: addition for addition in additions_of(name)}
    if name in LEVELS:
        columns["num_classes"] = len(LEVELS[name])
    method = fedsvi(regression(family, **columns), guides.mean_field)
    found = fit(method, data, rounds=1)
    assert np.isfinite(found.history["elbo"]).all()
    assert {*family.parameters(response_of(name))} <= {*found.draws(2).shared}
    assert bool(found.predict(data, draws=3).mean.isfinite().all())
    labels = found.posterior_predictive(draws=3)["posterior_predictive"]["y"].to_numpy()
    # times are drawn uncensored
    trials = {k: np.tile(data.fields[k].numpy(), 3) for k in columns if k == "trials"}
    family.check(labels.reshape(-1, *data.fields["y"].shape[1:]), trials)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_stage_finds_the_truth(name: str) -> None:
    """The truth lies within 4 posterior sds of the posterior mean, at each of 8 or more numbers."""
    truth, data = drawn(name, SEEDS.get(name, 3))
    method = two_stage(program(name, additions_of(name)), draws=500)
    found = hierfl.fit(method, data, progress=False)
    draws = found.draws(500)
    for site, values in {**draws.shared, **draws.own}.items():
        distance = (values.double().mean(0) - truth[site]) / values.double().std(0)
        assert bool((distance.abs() < 4.0).all()), (site, distance)
        assert bool(torch.isfinite(distance).all())
