"""Heart disease: 90 % predictive intervals of the hospitals' event rates cover those of held-out patients."""

from __future__ import annotations

import os

import pandas as pd
import pytest

from hierfl import datasets
from hierfl.demo import run as demo
from hierfl.diagnostics import client_rates, coverage_p_value
from tests.programs import fit


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("HIERFL_SLOW"),
    reason="HIERFL_SLOW is not set: five fits take a minute or two",
)
def test_intervals_of_event_rates_cover_over_five_splits() -> None:
    tables = []
    for seed in range(5):
        train, test = datasets.heart_disease().split(0.7, seed=seed)
        fitted = fit(demo.hierarchical_posterior(), train, rounds=60, seed=seed)
        # only the labels of the prediction are used, so one draw is enough
        prediction = fitted.predict(test, draws=1, seed=seed)
        tables.append(client_rates(prediction, fitted.replicate(test, draws=200, seed=seed)))
    found = pd.concat(tables)
    assert len(found) == 20
    assert coverage_p_value(found["covered"], 0.9) > 0.01, found  # 15 of 20 or more
    assert (
        found["high"] - found["low"]
    ).mean() < 0.3  # intervals do not cover merely by being wide
