"""Contrasts and marginal means are comparisons and predictions, under emmeans' names."""

from __future__ import annotations

import pytest
import xarray

from hierfl.effects.comparisons import comparisons
from hierfl.effects.contrasts import contrasts
from hierfl.effects.marginal_means import marginal_means
from hierfl.effects.predictions import predictions
from tests.effects.made import drawn, frame


def test_contrasts_are_comparisons_of_a_typical_row() -> None:
    found = drawn("count ~ arm + age", "poisson", draws=40)
    mine = contrasts(found, "arm", kind="ratio", prob=0.8, draws=40)
    same = comparisons(found, "arm", comparison="ratio", prob=0.8, draws=40)
    assert mine.frame.rename(columns={"contrast": "comparison"}).equals(same.frame)
    xarray.testing.assert_identical(mine.draws, same.draws)


def test_marginal_means_are_predictions_with_their_differences() -> None:
    found = drawn("y ~ arm + age", "gaussian", draws=40)
    mine = marginal_means(found, "arm", frame(), draws=40)
    same = predictions(found, "arm", frame(), draws=40)
    assert mine.frame.equals(same.frame)
    xarray.testing.assert_identical(mine.draws, same.draws)
    first, second = (mine.frame["mean"][j] for j in (0, 1))
    assert mine.differences["mean"][0] == pytest.approx(second - first, abs=1e-9)
    assert {"contrast", "p"} <= set(mine.differences)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'odds'"):
        contrasts(drawn("count ~ arm", "poisson", draws=20), "arm", kind="odds", draws=20)  # type: ignore[arg-type]
