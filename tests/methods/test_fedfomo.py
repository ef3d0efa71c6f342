"""FedFomo: weights by hand, clients alone without models, and attention to planted alike clients."""

from typing import Any

import pytest
import torch

from hierfl import ClientData, full_batch
from hierfl.engine.federation import federate
from hierfl.methods import fedfomo
from hierfl.methods.personalized.fedfomo import FedFomoClientState, some_rows
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, at, clients
from tests.programs import fit

STILL: dict[str, Any] = {"optimizer": SGD(0.0), "steps": 1, "unit": "step", "batch_size": None}
EXACT: dict[str, Any] = {"optimizer": SGD(0.1), "steps": 20, "unit": "step", "batch_size": None}


def test_weights_by_hand() -> None:
    """The oracle: the first quadratic, from 0, candidates (.5, .5), (.6, 0), (.2, 1)."""
    federation_ = federate(fedfomo(at(START), models=2, **STILL), clients())
    client = federation_.client
    before, last = {"theta": torch.zeros(2)}, {"theta": torch.tensor([0.5, 0.5])}
    sent = {"theta": torch.tensor([[0.6, 0.0], [0.2, 1.0]])}
    mail = {"models": sent, "there": torch.ones(2)}
    own = FedFomoClientState(before, last, mail, torch.ones(()))
    batch = full_batch(clients(), torch.tensor([0]))
    with torch.no_grad():
        work = client.phases[0].step(client.start({}, own), {}, batch)
    assert work.beside.scores.tolist() == pytest.approx([0.7, -0.804076], abs=1e-6)
    assert work.w["theta"].tolist() == pytest.approx([0.579838, 0.100811], abs=1e-6)
    own = own._replace(mail={"models": sent, "there": torch.zeros(2)})
    with torch.no_grad():
        work = client.phases[0].step(client.start({}, own), {}, batch)
    assert work.w["theta"].tolist() == pytest.approx([0.5, 0.5])


def kinds(n: int, seed: int = 0) -> ClientData:
    """Return six clients of two kinds, with a fifth of their rows for validation."""
    g, rows = torch.Generator().manual_seed(seed), {}
    for k in range(6):
        x = torch.randn(n, 4, generator=g)
        y = (1.0 if k % 2 else -1.0) * x.sum(1) + torch.randn(n, generator=g)
        rows[f"c{k}"] = {"x": x, "y": y, "held": (torch.arange(n) % 5 == 4).double()}
    return ClientData.from_clients(rows)


def test_validation_rows_are_not_trained_on() -> None:
    """Other labels on validation rows change which models are taken, and no step."""
    data = kinds(10)
    wrong = torch.where(data.fields["held"] > 0, 50.0, data.fields["y"])
    spoilt = ClientData({**data.fields, "y": wrong}, data.offsets, data.names)
    model = network(torch.nn.Linear(4, 1), likelihood=normal(1.0))
    method = fedfomo(model, validation="held", models=0, **{**EXACT, "batch_size": 2})
    one, two = (fit(method, d, rounds=1).progress.table.last for d in (data, spoilt))
    for name, value in one.items():
        assert torch.equal(value, two[name])
    on_all = fedfomo(model, models=0, **{**EXACT, "batch_size": 2})
    others = fit(on_all, data, rounds=1).progress.table.last
    assert not any(torch.equal(value, others[name]) for name, value in one.items())


def test_some_rows_are_scaled_up_and_none_count_nothing() -> None:
    program = federate(fedfomo(at(START)), clients()).program
    batch = full_batch(clients(), torch.tensor([0]))
    params = {"theta": torch.tensor([0.3, -0.2])}
    whole = program.mean_loss(params, batch)
    few, there = some_rows(batch, torch.arange(5)[None] < 2)
    assert float(there) == 1.0
    assert float(program.mean_loss(params, few)) == pytest.approx(float(whole))  # rows are alike
    none, there = some_rows(batch, torch.zeros(1, 5, dtype=torch.bool))
    assert float(there) == 0.0 and bool(program.mean_loss(params, none).isfinite())


def test_a_client_gets_models_of_others_that_have_trained() -> None:
    fitted = fit(fedfomo(at(START), models=2, **EXACT), clients(), rounds=1, cohort=1)
    server = fitted.progress.server
    trained = server.seen.nonzero()[:, 0]
    assert len(trained) == 1
    expected = torch.ones(3, 2)
    expected[:, 1] = 0.0
    expected[trained] = 0.0
    assert torch.equal(server.there, expected)
    sent = fitted.progress.table.mail["models"]["theta"]
    others = [k for k in range(3) if k != int(trained)]
    assert torch.equal(sent[others, 0], server.w["theta"][trained].expand(2, 2))
