"""Answers in the order of a frame, and labels that count as they do in the fit."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import diagnostics, methods
from hierfl.posterior.snapshot import with_fields_alone

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {"h": RNG.permutation(np.repeat(list("cab"), 12)), "x": RNG.normal(size=36)},
    index=[f"p{i}" for i in range(36)],
)
FRAME["y"] = 2.0 * FRAME.x + RNG.normal(size=36)


@cache
def fitted(missing: Any = "drop") -> Any:
    made = hierfl.formula("y ~ x + (1 | h)", clients="h", missing=missing).on(FRAME)
    return hierfl.fit(methods.fedsvi(made), made.data(FRAME), seed=0, rounds=2)


def test_answers_to_a_frame_are_in_its_order() -> None:
    fit = fitted()
    found, drawn = fit.predict(FRAME, draws=20), fit.replicate(FRAME, draws=20)
    np.testing.assert_allclose(found.label, FRAME.y, rtol=1e-6)
    of_data = fit.predict(fit.method.model.data(FRAME), draws=20)
    at = np.argsort(FRAME.h.to_numpy(), kind="stable")
    assert torch.equal(found.mean[at], of_data.mean)
    table = found.frame()
    assert list(table.index) == list(FRAME.index) and list(table.client) == list(FRAME.h)
    pd.testing.assert_frame_equal(found.scores(), of_data.scores())
    data = fit.method.model.data(FRAME)
    pd.testing.assert_frame_equal(
        diagnostics.client_scores(found, replicates=drawn),
        diagnostics.client_scores(of_data, replicates=fit.replicate(data, draws=20)),
    )
    parts = {name: FRAME[FRAME.h == name] for name in "bca"}
    assert np.allclose(fit.predict(parts, draws=2).label, pd.concat(parts).y)


def test_log_likelihood_and_loo_are_in_the_order_of_the_frame() -> None:
    fit = fitted()
    found = fit.posterior(draws=20, log_likelihood=True)
    rows = found["log_likelihood"]["y"]
    assert list(rows.coords["row"].values) == list(FRAME.index)
    np.testing.assert_allclose(found["observed_data"]["y"].values, FRAME.y, rtol=1e-6)
    drawn = fit.posterior_predictive(draws=5, rows=FRAME.iloc[::-1])
    np.testing.assert_allclose(drawn["observed_data"]["y"].values, FRAME.y[::-1], rtol=1e-6)
    with pytest.warns(UserWarning):  # two rounds: the weights are poor
        table = diagnostics.loo(fit, "row", draws=200, correct=None).table
    assert list(table.index) == list(FRAME.index) and list(table.client) == list(FRAME.h)


def test_rows_that_lack_a_value_are_nan_and_said() -> None:
    gaps = FRAME.copy()
    gaps.loc["p0", "x"] = np.nan
    gaps.loc[["p3", "p7"], "y"] = np.nan
    with pytest.warns(UserWarning, match="1 rows lack a value of a predictor"):
        found = fitted().predict(gaps, draws=20)
    whole = fitted().predict(FRAME, draws=20)
    assert found.mean.isnan().nonzero().flatten().tolist() == [0]
    assert torch.equal(found.mean[1:], whole.mean[1:])
    unscored = torch.tensor(gaps[["x", "y"]].isna().any(axis=1).tolist())
    assert torch.equal(found.log_score.isnan(), unscored)
    assert found.scores()["rows"].sum() == 33
    known = fitted().posterior_predictive(draws=2, rows=gaps.iloc[1:])["observed_data"]["y"]
    assert np.isnan(known.values).sum() == 2
    with pytest.raises(ValueError, match=r"is missing \d+ of \d+ values"):
        fitted("refuse").predict(gaps)
    none = fitted().predict(gaps.iloc[1:].assign(y=np.nan), draws=2)
    assert none.label is None


def counted(how: str) -> Any:
    def model(batch: Any) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with batch.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with batch.data():
                fn = dist.Normal(a, 1.0)
                if how == "mask":
                    fn = fn.mask(batch.weight > 0.5)
                with (
                    pyro.poutine.mask(mask=batch.weight > 0.5)
                    if how == "poutine.mask"
                    else pyro.poutine.scale(scale=batch.weight if how == "scale" else 1.0)
                ):
                    pyro.sample("y", fn, obs=batch.y)

    return model


@pytest.mark.parametrize("how", ["mask", "poutine.mask", "scale"])
def test_a_label_counts_in_scores_as_in_the_fit(how: str) -> None:
    weight = np.resize([1.0, 0.5, 3.0] if how == "scale" else [1.0, 0.0], 36)
    filled = np.where(weight > 0.0, FRAME.y, -999.0)
    data = hierfl.ClientData.from_arrays(FRAME.h.to_numpy(), y=filled, weight=weight)
    fit = hierfl.fit(methods.fedsvi(counted(how)), data, seed=0, rounds=2)
    found = fit.predict(data, draws=200)
    count = data.fields["weight"]
    label, score = found.known()
    assert torch.equal(label.isnan(), count == 0.0) and torch.equal(score.isnan(), count == 0.0)
    table, own = found.scores(), data.row_client == 0
    assert table["rows"].sum() == int((count > 0.0).sum())
    away = ((found.mean - data.fields["y"]) ** 2 * count)[own].sum() / count[own].sum()
    assert table["rmse"].iloc[0] == pytest.approx(float(away.sqrt()), rel=1e-5)
    each = np.concatenate(
        fit.posterior(draws=200, log_likelihood=True)["log_likelihood"]["y"].values
    )
    together = np.logaddexp.reduce(each, 0) - np.log(200)
    assert np.allclose(each[:, count == 0.0], 0.0)
    np.testing.assert_allclose(score[count > 0.0], together[count > 0.0], rtol=1e-4)
    drawn = fit.replicate(data, draws=50)
    assert diagnostics.client_scores(found, replicates=drawn)["crps"].max() < 10.0
    assert diagnostics.client_rates(found, drawn)["observed"].abs().max() < 10.0


def test_chunks_with_padded_rows_and_without_are_scored_together() -> None:
    """Two clients of two and three rows are carried first, then one of three, of which none is padded."""
    rows = FRAME.groupby("h").head(3).drop(index=FRAME[FRAME.h == "a"].index[0])
    made = hierfl.formula("y ~ x + (1 | h)", clients="h").on(rows)
    data, settings = made.data(rows), hierfl.Settings(chunk=2)
    few, whole = (
        hierfl.fit(methods.fedsvi(made), data, seed=0, rounds=2, settings=how)
        for how in (settings, hierfl.Settings())
    )
    found = few.predict(data, draws=20).scores()
    assert found["rows"].tolist() == [2, 3, 3]
    pd.testing.assert_frame_equal(found, whole.predict(data, draws=20).scores(), rtol=1e-5)


def test_fields_of_any_name_are_left_out_where_none_is_read() -> None:
    """Rows still count where a program reads no field of theirs; "there" was a name of ours."""
    data = hierfl.ClientData.from_arrays(["a", "a", "b"], there=torch.ones(3), y=torch.zeros(3))
    kept = with_fields_alone(data, frozenset())
    assert kept.num_rows == 3 and len(kept.fields) == 1 and not kept.fields["y"].any()
    assert [*with_fields_alone(data, frozenset({"there"})).fields] == ["there"]
