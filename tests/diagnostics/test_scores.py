"""Scores, calibration and fairness, against closed forms and against what chance alone gives."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from hierfl import ClientData, Fit, Prediction, diagnostics
from hierfl.diagnostics import (
    across_clients,
    calibration_error,
    client_rates,
    client_scores,
    coverage_p_value,
    crps,
    interval_coverage,
)
from hierfl.methods import fedsvi
from tests.programs import federation, fit, logistic, regression
from tests.runs.test_fit import kinds


def binary(p: Tensor, y: Tensor | None, counts: list[int]) -> Prediction:
    """Return binary predictions with the given probabilities and labels."""
    data = ClientData(
        {"x": p}, torch.tensor([0, *np.cumsum(counts)]), tuple(f"c{i}" for i in range(len(counts)))
    )
    log_score = None if y is None else torch.where(y > 0.5, p, 1 - p).log()
    return Prediction(
        data, "y", y, p, (p * (1 - p)).sqrt(), log_score, torch.zeros_like(p), "binary"
    )


@cache
def fitted(kind: str) -> Fit:
    data = federation()
    data = data.with_fields(kind=(data.fields["visits"].long() % 3))
    return fit(
        fedsvi({"binary": logistic, "numeric": regression, "classes": kinds}[kind]), data, rounds=2
    )


# -------------------------------------------------------------------------------------- calibration
def test_calibrated_probabilities_pass_and_distorted_ones_fail() -> None:
    g = np.random.Generator(np.random.Philox(1))
    p = g.random(400)
    y = g.random(400) < p
    right, wrong = calibration_error(p, y), calibration_error(np.clip(1.6 * p - 0.3, 0.01, 0.99), y)
    assert right.p_value > 0.05 and abs(right.ece - right.by_chance) < 0.03
    assert wrong.p_value < 0.01 and wrong.ece > 2 * wrong.by_chance


def test_p_values_are_uniform_under_calibration() -> None:
    g = np.random.Generator(np.random.Philox(2))
    found = []
    for seed in range(200):
        p = g.beta(1, 2, 60)
        found.append(calibration_error(p, g.random(60) < p, draws=99, seed=seed).p_value)
    assert 0.02 <= np.mean(np.array(found) <= 0.1) <= 0.2


def test_calibration_errors_are_the_weighted_gaps_of_the_bins() -> None:
    p, y = np.array([0.1, 0.2, 0.3, 0.6, 0.9]), np.array([0, 0, 1, 1, 1])
    found = calibration_error(p, y, bins=2)
    gaps = np.array([abs(1 / 3 - 0.2), 1.0 - 0.75])
    assert found.ece == pytest.approx(gaps @ [0.6, 0.4])
    assert found.reliability == pytest.approx(gaps**2 @ [0.6, 0.4])
    assert 0.0 < found.by_chance < 0.5 and found.rows == 5


def test_murphys_parts_sum_to_the_brier_score_if_bins_have_one_prediction() -> None:
    p, y = np.repeat([0.2, 0.5, 0.9], 20), np.random.Generator(np.random.Philox(3)).random(60) < 0.5
    share = y.reshape(3, 20).mean(1)
    resolution, uncertainty = ((share - y.mean()) ** 2).mean(), y.mean() * (1 - y.mean())
    assert calibration_error(p, y, bins=3).reliability - resolution + uncertainty == pytest.approx(
        ((p - y) ** 2).mean()
    )


# ------------------------------------------------------------------------------------------- scores
def test_crps_of_many_draws_is_the_closed_form_of_the_normal() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.tensor([-1.0, 0.3, 2.5])
    found = crps(1.0 + 0.5 * torch.randn(40_000, 3, generator=g), y)
    z = (y.numpy() - 1.0) / 0.5
    exact = 0.5 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    np.testing.assert_allclose(found, exact, atol=0.01)


def test_crps_is_the_double_sum_and_unbiased_for_few_draws() -> None:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 4, generator=g), torch.randn(4, generator=g)
    pairs = (x[:, None] - x[None]).abs().sum((0, 1)) / (7 * 6)
    torch.testing.assert_close(crps(x, y), (x - y).abs().mean(0) - pairs / 2)
    y = torch.full((20_000,), 0.7)
    few = crps(torch.randn(3, 20_000, generator=g), y).mean()
    many = crps(torch.randn(20_000, 1, generator=g), y[:1])
    assert float(few) == pytest.approx(float(many), abs=0.01)
    with pytest.raises(ValueError, match="S > 1"):
        crps(x[:1], y[:4])


@pytest.mark.parametrize("kind", ["binary", "classes", "numeric"])
def test_every_kind_of_label_has_its_scores(kind: str) -> None:
    found = fitted(kind)
    rows = found.federation.data
    prediction, replicates = found.predict(rows, draws=20), found.replicate(rows, draws=20)
    table = client_scores(prediction, replicates=replicates)
    assert list(table.index) == list(rows.names) and bool(
        np.isfinite(table.to_numpy(dtype=float)).all()
    )
    wanted = (
        ["crps", "coverage", "sharpness"]
        if kind == "numeric"
        else ["ece", "ece_by_chance", "sharpness"]
    )
    assert set(wanted) <= set(table.columns) and list(prediction.scores().columns) == list(
        table.columns[: len(prediction.scores().T)]
    )
    summary = across_clients(table)
    assert summary.loc["log_score", "weighted"] == pytest.approx(
        float(prediction.known()[1].mean())
    )
    if kind == "numeric":
        assert summary.loc["rmse", "weighted"] ** 2 == pytest.approx(
            float((prediction.mean - prediction.known()[0]).square().mean())
        )


def test_a_calibrated_brier_score_is_its_sharpness() -> None:
    g = torch.Generator().manual_seed(2)
    p = torch.rand(10_000, generator=g)
    table = client_scores(binary(p, (torch.rand(10_000, generator=g) < p).double(), [10_000]))
    assert table["brier"].item() == pytest.approx(table["sharpness"].item(), abs=0.008)


def test_the_worst_decile_is_the_mean_over_the_worst_clients() -> None:
    p = torch.linspace(0.05, 0.95, 20)
    table = binary(p, torch.ones(20), [1] * 20).scores()
    found = across_clients(table)
    assert found.loc["log_score", "worst_decile"] == pytest.approx(float(p[:2].log().mean()))
    assert found.loc["brier", "worst_decile"] == pytest.approx(float((1 - p[:2]).square().mean()))
    assert found.loc["brier", "worst"] == "c0" and found.loc["brier", "variance"] == pytest.approx(
        table["brier"].var(ddof=0)
    )
    with pytest.raises(ValueError, match="none of the scores"):
        across_clients(table[["rows"]])


# ----------------------------------------------------------------------------- replicates and rates
def test_replicates_have_the_moments_of_the_prediction() -> None:
    for kind in ("binary", "numeric"):
        rows = fitted(kind).federation.data
        prediction, y = (
            fitted(kind).predict(rows, draws=2000, seed=1),
            fitted(kind).replicate(rows, draws=2000, seed=1).double(),
        )
        sd = prediction.sd
        assert sd is not None
        assert float(((y.mean(0) - prediction.mean) / sd).abs().max()) < 4.5 / 2000**0.5
        torch.testing.assert_close(y.std(0), sd, rtol=0.15, atol=0.0)
    p = fitted("classes").predict(fitted("classes").federation.data, draws=2000, seed=1).mean
    y = fitted("classes").replicate(fitted("classes").federation.data, draws=2000, seed=1)
    torch.testing.assert_close(
        torch.nn.functional.one_hot(y, 3).double().mean(0), p, rtol=0.0, atol=0.05
    )


def test_replicates_do_not_depend_on_the_other_clients(global_generator_untouched: None) -> None:
    rows = fitted("binary").federation.data
    whole = fitted("binary").replicate(rows, draws=30, seed=5)
    alone = fitted("binary").replicate(rows.select(["east"]).without("ill"), draws=30, seed=5)
    at = int(rows.index(["east"]))
    assert torch.equal(alone, whole[:, rows.offsets[at] : rows.offsets[at + 1]])
    assert not torch.equal(whole, fitted("binary").replicate(rows, draws=30, seed=6))


def test_intervals_of_rates_have_their_nominal_coverage() -> None:
    """Probabilities are redrawn for each replicate; 90% of rates are covered."""
    g = torch.Generator().manual_seed(4)
    clients, each = 200, 60
    p = torch.rand(201, clients, generator=g).repeat_interleave(each, 1)
    y = (torch.rand(p.shape, generator=g) < p).double()
    table = client_rates(binary(p.mean(0), y[0], [each] * clients), y[1:])
    assert 0.86 <= table["covered"].mean() <= 0.95
    assert table["rows"].tolist() == [each] * clients and bool(
        (table["low"] <= table["high"]).all()
    )
    # independent rows ignore that the rows of a client share its probability: too narrow
    narrow = (torch.rand(200, clients * each, generator=g) < 0.5).double()
    fewer = client_rates(binary(p.mean(0), y[0], [each] * clients), narrow)["covered"]
    assert coverage_p_value(fewer, 0.9) < 1e-6 < coverage_p_value(table["covered"], 0.9)


def test_intervals_of_rows_have_their_nominal_coverage() -> None:
    g = torch.Generator().manual_seed(5)
    covered = interval_coverage(
        torch.randn(2000, 3000, generator=g), torch.randn(3000, generator=g), prob=0.8
    )
    assert covered.mean() == pytest.approx(0.8, abs=0.025)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: client_scores(binary(torch.tensor([0.5]), None, [1])), "no labels"),
        (
            lambda: client_rates(
                binary(torch.tensor([0.5]), torch.tensor([1.0]), [1]), torch.ones(3, 2)
            ),
            r"it must be \(S, 1\), for the same rows",
        ),
        (
            lambda: diagnostics.confidence(
                fitted("numeric").predict(fitted("numeric").federation.data, draws=2)
            ),
            "numeric",
        ),
        (
            lambda: client_rates(
                fitted("classes").predict(fitted("classes").federation.data, draws=2),
                torch.ones(3, 16),
            ),
            "classes have no mean",
        ),
    ],
)
def test_predictions_that_cannot_be_scored_are_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()
