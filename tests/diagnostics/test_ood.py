"""Predictive entropies of own and foreign rows, against written-out definitions."""

import numpy as np
import pytest
import torch

from hierfl import ClientData, Prediction
from hierfl.diagnostics import (
    auroc,
    entropy_density,
    fpr95,
    mutual_information,
    out_of_distribution,
    predictive_entropy,
)
from hierfl.guides import delta
from hierfl.methods import fedsvi
from tests.programs import federation, fit, logistic, regression
from tests.runs.test_fit import kinds


def classes(p: torch.Tensor, noise: torch.Tensor, counts: list[int]) -> Prediction:
    data = ClientData(
        {"x": p}, torch.tensor([0, *np.cumsum(counts)]), tuple(f"c{i}" for i in range(len(counts)))
    )
    return Prediction(data, "y", None, p, None, None, noise, "categorical")


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    g = np.random.Generator(np.random.Philox(0))
    a, b = g.integers(0, 6, 40).astype(float), g.integers(0, 5, 30).astype(float)
    pairs = (a[:, None] > b[None]).mean() + 0.5 * (a[:, None] == b[None]).mean()
    assert auroc(a, b) == pytest.approx(pairs)


def test_auroc_equals_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    g = np.random.Generator(np.random.Philox(1))
    a, b = g.normal(1.0, 1.0, 50), g.normal(0.0, 2.0, 80)
    assert auroc(a, b) == pytest.approx(
        metrics.roc_auc_score(np.repeat([1, 0], [50, 80]), np.concatenate([a, b]))
    )


def test_the_threshold_of_fpr95_accepts_95_percent_of_own_rows() -> None:
    own = np.arange(100.0)
    # the threshold is 94: 95 of the 100 own rows are at most that
    assert fpr95([94.0, 94.5, 95.0, 200.0], own) == 0.25
    assert fpr95(own, own) == 0.95
    assert fpr95([1e9], own) == 0.0


def test_entropy_and_mutual_information_are_means_over_draws() -> None:
    data = federation()
    data = data.with_fields(kind=(data.fields["visits"].long() % 3))
    fitted = fit(fedsvi(kinds), data, rounds=2)
    w = fitted.draws(30, seed=4).own["w"][:, data.row_client]
    p = torch.softmax(torch.einsum("nd,snkd->snk", data.fields["x"], w), -1)
    found = fitted.predict(data, draws=30, seed=4)
    total = -(p.mean(0) * p.mean(0).log()).sum(-1)
    torch.testing.assert_close(predictive_entropy(found), total)
    torch.testing.assert_close(mutual_information(found), total + (p * p.log()).sum(-1).mean(0))
    fitted = fit(fedsvi(logistic), data, rounds=2)
    p = torch.sigmoid(
        (fitted.draws(30, seed=4).own["slope"][:, data.row_client] * data.fields["x"]).sum(-1)
    )
    found = fitted.predict(data, draws=30, seed=4)
    both = torch.stack([p, 1 - p])
    total = -(both.mean(1) * both.mean(1).log()).sum(0)
    torch.testing.assert_close(predictive_entropy(found), total)
    torch.testing.assert_close(
        mutual_information(found), total + (both * both.log()).sum(0).mean(0)
    )
    assert float(mutual_information(found).min()) > 0.0


def test_a_point_estimate_has_no_mutual_information() -> None:
    fitted = fit(fedsvi(logistic, guide=delta), federation(), rounds=2)
    assert float(mutual_information(fitted.predict(federation(), draws=1)).max()) < 1e-12


def test_certain_predictions_have_entropy_0() -> None:
    p = torch.eye(3)[[0, 1]]
    assert predictive_entropy(classes(p, torch.zeros(2), [2])).tolist() == [0.0, 0.0]


def test_foreign_rows_are_compared_with_the_same_clients_own_rows() -> None:
    flat, sure = torch.full((3, 4), 0.25), torch.tensor([[0.97, 0.01, 0.01, 0.01]]).repeat(3, 1)
    own = classes(torch.cat([sure, flat]), torch.zeros(6), [3, 3])
    foreign = classes(torch.cat([flat, sure]), torch.zeros(6), [3, 3])
    found = out_of_distribution(own, foreign)
    assert found.clients["auroc"].tolist() == [1.0, 0.0] and found.clients["fpr95"].tolist() == [
        0.0,
        1.0,
    ]
    assert found.overall["auroc"] == 0.5 and found.overall["foreign_rows"] == 6
    assert found.clients.loc["c0", "foreign_entropy"] == pytest.approx(np.log(4.0))
    torch.testing.assert_close(torch.from_numpy(found.entropies[0]), predictive_entropy(own))
    assert {"mi_auroc", "mi_fpr95"} <= set(found.clients.columns)


def test_numeric_labels_are_compared_by_their_predictive_sd() -> None:
    fitted = fit(fedsvi(regression), federation(), rounds=2)
    far = federation().with_fields(x=30.0 * federation().fields["x"]).without("y")
    found = out_of_distribution(
        fitted.predict(federation(), draws=50), fitted.predict(far, draws=50)
    )
    assert found.overall["auroc"] > 0.9 and "mi_auroc" not in found.clients
    with pytest.raises(ValueError, match="mutual information needs a binary or categorical site"):
        mutual_information(fitted.predict(far, draws=2))


def test_foreign_rows_need_a_client_with_own_rows() -> None:
    p = torch.full((3, 2), 0.5)
    with pytest.raises(KeyError, match="unknown client 'c1'"):
        out_of_distribution(classes(p, torch.zeros(3), [3]), classes(p, torch.zeros(3), [1, 2]))


def test_the_density_of_entropies_integrates_to_one_and_is_right_at_0() -> None:
    grid = np.linspace(0.0, 3.0, 3001)
    density = entropy_density(np.array([0.0, 0.01, 0.02, 1.0]), grid)
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-3)
    assert density[0] > 4.0
    certain = entropy_density(
        np.zeros(5), grid
    )  # of a client without a doubt: the kernel's own half
    assert np.trapezoid(certain, grid) == pytest.approx(1.0, abs=1e-3)
    assert certain[0] == pytest.approx(2.0 / (0.05 * (2.0 * np.pi) ** 0.5))
