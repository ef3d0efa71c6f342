"""FedAMP: its stationary points, its reductions, and attention to clients that are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hierfl.data.clients import ClientData
from hierfl.methods import fedamp, heur_fedamp
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, B, H, at, clients
from tests.programs import fit

EXACT: dict[str, Any] = {"optimizer": SGD(0.3), "steps": 20, "unit": "step", "batch_size": None}


@pytest.mark.parametrize("alpha", [2.0, 1.0])
def test_fixed_points_do_not_depend_on_alpha_and_are_stationary(alpha: float) -> None:
    sigma, lam = 10.0, 1.0
    method = fedamp(at(START), prox=lam, alpha=alpha, sigma=sigma, **EXACT)
    fitted = fit(method, clients(), rounds=60)
    w = fitted.progress.table["w"]["theta"]
    published = [(0.834724, 0.093234), (0.049858, 1.785395), (-0.654275, 1.001069)]
    assert torch.allclose(w, torch.tensor(published), atol=2e-6)
    slope = (H @ (w - B)[..., None])[..., 0]
    away = w[:, None] - w
    pull = (torch.exp(-away.square().sum(-1) / sigma) / sigma)[..., None] * away
    assert torch.allclose(slope, -lam * pull.sum(1), atol=1e-8)
    weight = alpha / sigma * torch.exp(-away.square().sum(-1) / sigma)
    own = 1.0 - (weight.sum(1) - weight.diagonal()).mean()
    assert fitted.history["self_weight"].iloc[-1] == pytest.approx(float(own), abs=1e-9)


def test_far_scales_pull_all_clients_to_their_mean() -> None:
    """As sigma grows with alpha / sigma = 1 / N, every u is the mean of all models: the last one received."""
    method = fedamp(at(START), prox=2.0, alpha=1e9 / 3.0, sigma=1e9, **EXACT)
    fitted = fit(method, clients(), rounds=2)
    mean = fitted.progress.server["w"]["theta"].mean(0)
    assert torch.allclose(fitted.progress.table["mail"]["theta"], mean.expand(3, 2), atol=1e-6)


def test_heuristic_weights_are_a_softmax_of_cosines() -> None:
    method = heur_fedamp(at(START), sigma=3.0, self_weight=0.25, prox=0.5, **EXACT)
    fitted = fit(method, clients(), rounds=1)
    w = fitted.progress.server["w"]["theta"]
    unit = w / w.norm(dim=1, keepdim=True)
    share = torch.exp(3.0 * unit @ unit.T)
    share.fill_diagonal_(0.0)
    mix = 0.75 * (share / share.sum(1, keepdim=True)) @ w + 0.25 * w
    assert torch.allclose(fitted.progress.table["mail"]["theta"], mix, atol=1e-12)


@pytest.mark.parametrize("make", [fedamp, heur_fedamp])
def test_similar_clients_attend_to_each_other(make: Any) -> None:
    """Of six clients in two kinds, each is pulled toward its own kind more than to the other."""
    g = torch.Generator().manual_seed(0)
    truth = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    rows = {}
    for k, slope in enumerate(truth.tolist()):
        x = torch.randn(8, 2, generator=g)
        rows[f"c{k}"] = {"x": x, "y": slope * x.sum(1) + torch.randn(8, generator=g)}
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    how = {"alpha": 0.3, "sigma": 2.0} if make is fedamp else {"sigma": 5.0}
    method = make(network(net, likelihood=normal(1.0)), prox=0.3, **how, **EXACT)
    fitted = fit(method, ClientData.from_clients(rows), rounds=10)
    server = fitted.progress.server
    name = next(iter(server["w"]))
    mix = server["mix"][name].flatten(1).sum(1)
    assert (mix.sign() == truth.sign()).all()


def test_a_client_outside_the_cohort_keeps_its_model() -> None:
    method = fedamp(at(START), sigma=50.0, **EXACT)
    one, two = (fit(method, clients(), rounds=r, cohort=1) for r in (1, 2))
    moved = (one.progress.server["w"]["theta"] != two.progress.server["w"]["theta"]).any(1)
    assert moved.sum() == 1
