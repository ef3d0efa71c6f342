"""FedAMP: its stationary points, its reductions, and attention to clients that are alike."""

from typing import Any

import pytest
import torch

from hierfl.methods import fedamp, heur_fedamp
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, B, H, at, clients
from tests.programs import fit

EXACT: dict[str, Any] = {"optimizer": SGD(0.3), "steps": 20, "unit": "step", "batch_size": None}


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "rounds"), [(2.0, 30), (1.0, 55)])
def test_fixed_points_do_not_depend_on_alpha_and_are_stationary(alpha: float, rounds: int) -> None:
    sigma, lam = 10.0, 1.0
    method = fedamp(at(START), prox=lam, alpha=alpha, sigma=sigma, **EXACT)
    fitted = fit(method, clients(), rounds=rounds)
    w = fitted.progress.table.params["theta"]
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
    mean = fitted.progress.server.w["theta"].mean(0)
    assert torch.allclose(fitted.progress.table.mail["theta"], mean.expand(3, 2), atol=1e-6)


def test_heuristic_weights_are_a_softmax_of_cosines() -> None:
    method = heur_fedamp(at(START), sigma=3.0, self_weight=0.25, prox=0.5, **EXACT)
    fitted = fit(method, clients(), rounds=1)
    w = fitted.progress.server.w["theta"]
    unit = w / w.norm(dim=1, keepdim=True)
    share = torch.exp(3.0 * unit @ unit.T)
    share.fill_diagonal_(0.0)
    mix = 0.75 * (share / share.sum(1, keepdim=True)) @ w + 0.25 * w
    assert torch.allclose(fitted.progress.table.mail["theta"], mix, atol=1e-12)


def test_a_client_outside_the_cohort_keeps_its_model() -> None:
    method = fedamp(at(START), sigma=50.0, **EXACT)
    one, two = (fit(method, clients(), rounds=r, cohort=1) for r in (1, 2))
    moved = (one.progress.server.w["theta"] != two.progress.server.w["theta"]).any(1)
    assert moved.sum() == 1
