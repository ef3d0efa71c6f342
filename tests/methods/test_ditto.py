"""Ditto and Individual: closed forms on quadratics, and equalities with other methods."""

import torch

from hierfl.methods import ditto
from hierfl.optimizers import SGD
from tests.methods.quadratics import I2, B, H, at, clients
from tests.programs import fit


def test_personal_models_at_fedavgs_fixed_point() -> None:
    lam, theta = 0.5, torch.tensor([0.479235, 0.617678])
    method = ditto(
        at(theta), prox=lam, optimizer=SGD(0.1), steps=5, personal_steps=250, batch_size=None
    )
    fitted = fit(method, clients(), rounds=1)
    wanted = torch.linalg.solve(H + lam * I2, (H @ B[..., None])[..., 0] + lam * theta)
    assert torch.allclose(fitted.progress.table.params["theta"], wanted, atol=1e-9)
    published = [(0.826412, 0.123536), (0.201431, 1.472082), (-0.260382, 0.945383)]
    assert torch.allclose(wanted, torch.tensor(published), atol=2e-6)
