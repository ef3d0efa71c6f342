"""FedPAC: weights of heads by hand and by another solver, the pull of features, planted kinds of clients."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from hierfl import ClientData
from hierfl.methods import fedavg, fedpac
from hierfl.methods.personalized.fedpac import weights_of
from hierfl.models import HeadedNetwork, network
from hierfl.optimizers import SGD
from tests.programs import fit

SEEN = torch.ones(2, dtype=torch.bool)
FULL: dict[str, Any] = {"unit": "step", "batch_size": None}


def test_weights_by_hand() -> None:
    """Of two clients: ((V2 + d2) / (V1 + V2 + d2), V1 / (V1 + V2 + d2)) with V = (.3, .5) and d2 = .2."""
    h, v = torch.tensor([[0.0, 0.0], [0.2**0.5, 0.0]]), torch.tensor([0.3, 0.5])
    found = weights_of(h, v, SEEN)
    assert found[0].tolist() == pytest.approx([0.7, 0.3], abs=1e-9)
    assert found[1].tolist() == pytest.approx([0.5, 0.5], abs=1e-9)
    alike = weights_of(torch.zeros(3, 2), torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert torch.allclose(alike, torch.full((3, 3), 1.0 / 3.0))
    alone = weights_of(h, v, torch.tensor([True, False]))
    assert torch.equal(alone, torch.eye(2))


def test_weights_are_the_least_over_the_simplex() -> None:
    """Against SLSQP, to what it can resolve."""
    rng = np.random.default_rng(0)
    h, v = rng.normal(size=(6, 4)), rng.uniform(0.2, 3.0, 6)
    found = weights_of(torch.tensor(h), torch.tensor(v), torch.ones(6, dtype=torch.bool)).numpy()
    for i in range(6):
        away = h - h[i]
        form = np.diag(v) + away @ away.T
        known = minimize(
            lambda a, form=form: a @ form @ a,
            np.full(6, 1.0 / 6.0),
            jac=lambda a, form=form: 2.0 * form @ a,
            bounds=[(0.0, 1.0)] * 6,
            constraints=[{"type": "eq", "fun": lambda a: a.sum() - 1.0}],
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert found[i] == pytest.approx(known.x, abs=2e-3)  # weights below 0.001 are cut
        assert found[i] @ form @ found[i] <= known.fun + 1e-3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


def kinds(n: int, seed: int = 0) -> ClientData:
    """Return six clients of two kinds, whose labels are each other's opposite."""
    g, rows = torch.Generator().manual_seed(seed), {}
    for k in range(6):
        x = torch.randn(n + 3 * k, 2, generator=g)
        rows[f"c{k}"] = {"x": x, "y": ((x[:, 0] > 0.3) ^ bool(k % 2)).long()}
    return ClientData.from_clients(rows)


def test_a_step_of_the_body_has_the_pull_of_its_features() -> None:
    """In the second round, by autograd at the first round's params, with the means of all clients."""
    lr, lam, data = 0.1, 0.7, kinds(12)
    how: dict[str, Any] = {"feature_weight": lam, "optimizer": SGD(lr)}
    how |= {"head_steps": 0, "body_steps": 1}
    method = fedpac(HeadedNetwork(net(), head="2"), mix=False, **how, **FULL)
    one, two = (fit(method, data, rounds=r).message for r in (1, 2))
    body = {k: v.clone().requires_grad_() for k, v in one["body"].items()}

    def features(x: Tensor) -> Tensor:
        return torch.tanh(x @ body["theta.0.weight"].T + body["theta.0.bias"])

    # heads have not moved: they are the module's
    head = {k: v for k, v in net().double().named_parameters() if k.startswith("2.")}
    loss = torch.zeros(())
    for part in torch.arange(6):
        few = data.select(part[None])
        z, y = features(few.fields["x"]), few.fields["y"]
        nll = nn.functional.cross_entropy(z @ head["2.weight"].T + head["2.bias"], y)
        mean_loss = nll + lam * (z - one["mu"][y]).square().mean()
        loss = loss + len(y) / data.num_rows * mean_loss
    slopes = torch.autograd.grad(loss, list(body.values()))
    for (name, value), slope in zip(body.items(), slopes, strict=True):
        assert torch.allclose(value - lr * slope, two["body"][name], rtol=0.0, atol=1e-6)


def test_means_are_those_of_all_rows() -> None:
    """After a round, with clients of different sizes, mu is the mean over all rows of the bodies they sent."""
    how: dict[str, Any] = {"optimizer": SGD(0.0), "head_steps": 1, "body_steps": 1}
    data = kinds(7)
    message = fit(fedpac(HeadedNetwork(net(), head="2"), **how, **FULL), data, rounds=1).message
    module = net().to(data.fields["x"].dtype)
    z = torch.tanh(module[0](data.fields["x"]))  # type: ignore[index]
    expected = torch.stack([z[data.fields["y"] == c].mean(0) for c in (0, 1)])
    assert torch.allclose(message["mu"], expected.detach(), atol=1e-9)
    assert message["known"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_heads_of_a_kind_are_mixed_and_tell_kinds_apart() -> None:
    data, fresh = kinds(20), kinds(60, seed=1)
    how: dict[str, Any] = {"head_optimizer": SGD(0.5), "optimizer": SGD(0.1)}
    how |= {"head_steps": 5, "body_steps": 5}
    fitted = fit(fedpac(HeadedNetwork(net(), head="2"), **how, **FULL), data, rounds=15)
    server = fitted.progress.server
    weight = weights_of(server.h.flatten(1), server.v, server.seen)
    alike = torch.arange(6)[:, None] % 2 == torch.arange(6) % 2
    assert weight[alike].sum() / 6.0 > 0.95
    assert fitted.predict(fresh).scores()["accuracy"].mean() > 0.85
    plain = fedavg(network(net()), optimizer=SGD(0.1), steps=10, batch_size=None)
    assert fit(plain, data, rounds=15).predict(fresh).scores()["accuracy"].mean() < 0.65
    new, later = (ClientData(of.fields, of.offsets, tuple("pqrstu")) for of in (data, fresh))
    joined = fitted.personalize(new, rounds=10).predict(later)
    assert joined.scores()["accuracy"].mean() > 0.8


def test_a_class_that_nobody_has_pulls_nowhere() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    fitted = fit(fedpac(HeadedNetwork(module, head="2"), **FULL), kinds(8), rounds=2)
    assert fitted.message["known"].tolist() == [1.0, 1.0, 0.0]
    assert not fitted.message["mu"][2].any()
