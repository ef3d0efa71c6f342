"""Ditto and Individual: closed forms on quadratics, and equalities with other methods."""

from __future__ import annotations

import math

import pytest
import torch

from hierfl.engine.chunks import client_round
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from hierfl.method import Clock
from hierfl.methods import ditto, local_only
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.quadratics import I2, START, B, H, at, clients
from tests.programs import federation, fit


@pytest.mark.parametrize(
    ("k", "published"),
    [(0, (0.826412, 0.123536)), (1, (0.201431, 1.472082)), (2, (-0.260382, 0.945383))],
)
def test_personal_models_at_fedavgs_fixed_point(k: int, published: tuple[float, float]) -> None:
    lam, theta = 0.5, torch.tensor([0.479235, 0.617678])
    method = ditto(
        at(theta), prox=lam, optimizer=SGD(0.1), steps=5, personal_steps=250, batch_size=None
    )
    fitted = fit(method, clients(), rounds=1)
    wanted = torch.linalg.solve(H + lam * I2, (H @ B[..., None])[..., 0] + lam * theta)
    assert torch.allclose(fitted.progress.table["theta"]["theta"], wanted, atol=1e-9)
    assert wanted[k].tolist() == pytest.approx(published, abs=2e-6)


def test_of_local_only_the_servers_params_do_not_change() -> None:
    model = network(torch.nn.Linear(2, 1), likelihood=normal(1.0))
    fitted = fit(local_only(model, steps=2, batch_size=2), federation((5, 3)), rounds=3)
    for name, value in fitted.message.items():
        assert torch.equal(value, fitted.program.start()[0][name])


def test_a_very_large_lam_gives_the_common_model() -> None:
    method = ditto(
        at(START), prox=1e4, optimizer=SGD(1e-4), steps=3, personal_steps=40, batch_size=None
    )
    fitted = fit(method, clients(), rounds=1)
    assert torch.allclose(fitted.progress.table["theta"]["theta"], START.expand(3, 2), atol=2e-3)


def test_a_new_client_takes_only_the_personal_steps() -> None:
    model = network(torch.nn.Linear(2, 1), likelihood=normal(1.0))
    fitted = fit(
        ditto(model, prox=math.exp(1.0), optimizer=SGD(0.1), steps=4), federation(), rounds=3
    )
    new = fitted.personalize(federation((8,), seed=4), rounds=30)
    for name, value in new.message.items():
        assert torch.equal(value, fitted.message[name])
    assert not torch.equal(
        new.progress.table["theta"]["theta.weight"][0], fitted.message["theta.weight"]
    )


def test_the_personal_model_is_not_sent() -> None:
    model = network(torch.nn.Linear(2, 1), likelihood=normal(1.0))
    for method, expected in ((ditto(model), {"theta", "loss"}), (local_only(model), {"loss"})):
        federation_ = federate(method, federation())
        start = begin(federation_)
        message = federation_.server.down(start.server, Clock(0, 1))
        up, own = client_round(
            federation_, federation_.client.phases, message, start.table, torch.arange(4), 0
        )
        assert set(up) == expected
        if "theta" in up:  # FedAvg's copy, weighted by the client's rows
            mine = own["theta"]["theta.weight"] * up["theta"].weight[:, None, None]
            assert not torch.allclose(up["theta"].value["theta.weight"], mine)
