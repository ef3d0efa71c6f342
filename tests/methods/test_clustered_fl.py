"""Clustered federated learning: halvings by hand, FedAvg without them, planted clusters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl import ClientData
from hierfl.methods import clustered_fl
from hierfl.methods.clustered.clustered_fl import halved
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.quadratics import ALL_ROWS
from tests.programs import fit


def kind(slope: float, n: int, g: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(n, 2, generator=g)
    return {"x": x, "y": slope * x.sum(1) + 0.1 * torch.randn(n, generator=g)}


def largest_across(updates: torch.Tensor, half: torch.Tensor) -> float:
    unit = updates / updates.norm(dim=1, keepdim=True)
    return float((unit @ unit.T)[half][:, ~half].max())


def test_single_linkage_is_the_best_halving_of_random_updates() -> None:
    """Against every halving of six clients."""
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        updates = torch.randn(6, 3, generator=g)
        every = [torch.tensor([False] + [bool(n >> j & 1) for j in range(5)]) for n in range(1, 32)]
        best = min(largest_across(updates, half) for half in every)
        assert largest_across(updates, halved(updates)) == pytest.approx(best)


def test_planted_clusters_are_found_and_a_new_client_takes_its_own() -> None:
    g = torch.Generator().manual_seed(0)
    slopes = [1.5, -1.5, 1.5, 1.5, -1.5]
    data = ClientData.from_clients({f"c{k}": kind(s, 20, g) for k, s in enumerate(slopes)})
    how: dict[str, Any] = {"mean_norm": 0.05, "client_norm": 0.1, "warmup_rounds": 5}
    how |= {"optimizer": SGD(0.05), **ALL_ROWS, "steps": 5}
    model = network(torch.nn.Linear(2, 1), likelihood=normal(1.0))
    fitted = fit(clustered_fl(model, **how), data, rounds=25)
    cluster = fitted.progress.server.cluster
    assert ((cluster == cluster[0]) == (torch.tensor(slopes) > 0)).all()
    assert fitted.history["clusters"].iloc[0] == 1.0 and fitted.history["clusters"].iloc[-1] == 2.0
    assert (fitted.predict(data).scores()["rmse"] < 0.2).all()
    new = ClientData.from_clients({"p": kind(1.5, 20, g), "q": kind(-1.5, 20, g)})
    joined = fitted.personalize(new, rounds=1)
    assert (joined.predict(new).scores()["rmse"] < 0.2).all()
