"""Diagnostics of single papers against closed forms.

PRIOR's coherence and loss deviations, FedMAP's effective clients, FedVI's generalization gaps.
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from hierfl import ClientData, Prediction, predict_from_prior
from hierfl.diagnostics import (
    client_gradients,
    coherence,
    generalization_gap,
    loss_deviations,
)
from hierfl.engine.client_store import taken
from hierfl.guides import delta
from hierfl.methods import fedavg, fedmap, fedsvi, pfedme
from hierfl.models import bayesian_network, learned_prior_network, network
from hierfl.models.likelihood import normal
from tests.programs import federation, fit, logistic, regression


def line() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


# ---------------------------------------------------------------------------------------- coherence
def test_coherence_of_two_vectors_is_the_squared_cosine() -> None:
    a, b = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([1.0, 2.0, 2.0])
    cosine = float(a @ b / (a.norm() * b.norm()))
    assert coherence(torch.stack([a, b])).estimate == pytest.approx(cosine**2)
    assert coherence(torch.stack([1e6 * a, 1e-6 * b])).minus_log_det == pytest.approx(
        -math.log(1 - cosine**2)
    )


def test_coherence_is_0_for_orthogonal_and_1_for_dependent_vectors() -> None:
    assert coherence(torch.eye(4)).estimate == 0.0
    v = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    near = torch.cat(
        [v, v[:1] + 1e-3 * torch.randn(1, 5, generator=torch.Generator().manual_seed(1))]
    )
    assert 0.999 < coherence(near).estimate <= 1.0 and coherence(near).minus_log_det > 5.0
    assert (
        coherence(torch.randn(6, 5, generator=torch.Generator().manual_seed(2))).minus_log_det
        == math.inf
    )
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(3))).Q
    assert coherence(v @ rotation).estimate == pytest.approx(coherence(v).estimate)
    with pytest.raises(ValueError, match="vector 1 has length 0"):
        coherence(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_slopes_of_fedavg_are_the_gradients_of_the_loss() -> None:
    data = federation()
    fitted = fit(fedavg(network(line(), likelihood=normal(1.0))), data, rounds=1)
    weight, bias = fitted.message["theta.weight"][0], fitted.message["theta.bias"]
    residual = data.fields["x"] @ weight + bias - data.fields["y"]
    found = client_gradients(fitted, draws=1)
    names = list(fitted.program.start()[0])
    for i, part in enumerate(residual.split(data.counts.tolist())):
        x = data.fields["x"][data.offsets[i] : data.offsets[i + 1]]
        expected = {"theta.weight": part @ x, "theta.bias": part.sum()[None]}
        torch.testing.assert_close(found[i], torch.cat([expected[n].flatten() for n in names]))


def test_slopes_of_pfedme_are_those_of_the_moreau_envelope() -> None:
    """lam (theta - w_i), with unit prior scale; this holds for any loss of the client."""
    model = bayesian_network(line(), likelihood=normal(1.0), prior_loc="learned", prior_scale=1.0)
    fitted = fit(pfedme(model, steps=3, batch_size=None), federation(), rounds=2)
    own, names = fitted.draws(1).own, list(fitted.program.start()[0])
    params = fitted.federation.client.params(
        fitted.message, taken(fitted.progress.table, torch.tensor(0))
    )
    away = torch.cat([(params[n] - own[n.replace("theta", "w")][0]).flatten(1) for n in names], 1)
    torch.testing.assert_close(client_gradients(fitted, draws=1), away)
    assert 0.0 < coherence(away[:3]).estimate < 1.0


# --------------------------------------------------------------------------------------- deviations
def test_deviations_are_from_the_weighted_mean_and_0_for_an_absent_class() -> None:
    p = torch.tensor([0.9, 0.2, 0.6, 0.5, 0.7])
    y = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    data = ClientData({"x": p}, torch.tensor([0, 2, 5]), ("a", "b"))
    log_score = torch.where(y > 0.5, p, 1 - p).log()
    found = loss_deviations(Prediction(data, "y", y, p, None, log_score, None, "binary"))
    ones = -torch.tensor([0.9, 0.6, 0.5, 0.7]).log().numpy()
    expected = pd.DataFrame(
        [[0.0, ones[0] - ones.mean()], [0.0, ones[1:].mean() - ones.mean()]],
        index=["a", "b"],
        columns=[0, 1],
    )
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), atol=1e-12)
    assert found.loc["a", 1] + 3 * found.loc["b", 1] == pytest.approx(
        0.0
    )  # weighted by rows, deviations sum to 0


# -------------------------------------------------------------------------------- effective clients
def test_the_history_of_fedmap_has_effective_clients() -> None:
    data = federation()
    fitted = fit(
        fedmap(learned_prior_network(line(), likelihood=normal(1.0)), weights="rows"),
        data,
        rounds=1,
    )
    n = data.counts.double()
    expected = float(n.sum() ** 2 / n.square().sum())
    assert fitted.history["effective_clients"][0] == pytest.approx(expected)


# --------------------------------------------------------------------------------------------- gaps
def test_generalization_gaps_are_differences_of_scores() -> None:
    train, rest = federation(counts=(30, 30, 30, 30, 30)).split(0.5, seed=0)
    fitted = fit(fedsvi(logistic, guide=delta), train.select([0, 1, 2]), rounds=30)
    here, there = (
        fitted.predict(train.select([0, 1, 2]), draws=1),
        fitted.predict(rest.select([0, 1, 2]), draws=1),
    )
    new = predict_from_prior(fitted, rest.select([3, 4]), draws=20)
    found = generalization_gap(here, there, new_clients=new)
    log = found.scores.loc["log_score"]
    assert log["out_of_sample"] == pytest.approx(
        float(here.known()[1].mean() - there.known()[1].mean())
    )
    assert log["participation"] == pytest.approx(
        float(there.known()[1].mean() - new.known()[1].mean())
    )
    brier = found.scores.loc["brier"]
    assert brier["out_of_sample"] == pytest.approx(brier["held_out"] - brier["train"])
    assert found.clients.shape == (3, 3) and found.clients["log_score"].mean() == pytest.approx(
        log["out_of_sample"]
    )
    with pytest.raises(ValueError, match="different kinds"):
        generalization_gap(here, fit(fedsvi(regression), train, rounds=1).predict(rest, draws=2))
