"""FedAvg and FedProx: closed-form fixed points, a plain torch loop, and equalities between methods."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl import ClientData, Phase
from hierfl.methods import fedavg, over_relaxed
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods.quadratics import I2, START, UNIFORM, B, H, P, at, clients, stationary, theta
from tests.programs import federation, fit, row_plan

LR = 0.1


def powers(a: Tensor, m: int) -> Tensor:
    return torch.linalg.matrix_power(I2 - LR * a, m)


@pytest.mark.slow("20-0.0-1.0-published2")
@pytest.mark.parametrize(
    ("m", "prox", "beta", "published"),
    [
        (1, 0.0, 1.0, (0.509413, 0.591362)),
        (5, 0.0, 1.0, (0.479235, 0.617678)),
        (20, 0.0, 1.0, (0.391585, 0.734012)),
        (5, 0.0, 2.0, (0.479235, 0.617678)),
        (5, 1.0, 1.0, (0.479816, 0.617230)),
    ],
)
def test_fixed_point(m: int, prox: float, beta: float, published: tuple[float, float]) -> None:
    a = H + prox * I2
    fixed = stationary(P[:, None, None] * (I2 - powers(a, m)) @ torch.linalg.solve(a, H))
    assert fixed.tolist() == pytest.approx(published, abs=1e-6)
    options: dict[str, Any] = {"optimizer": SGD(LR), "steps": m, "batch_size": None, "prox": prox}
    method = over_relaxed(fedavg(at(fixed), **options), beta)
    assert torch.allclose(theta(fit(method, clients(), rounds=1)), fixed, atol=1e-12), (
        "one round does not move it"
    )
    away = fit(over_relaxed(fedavg(at(START), **options), beta), clients(), rounds=max(12, 60 // m))
    assert torch.allclose(theta(away), fixed, atol=0.03), "and rounds converge to it"


@pytest.mark.parametrize(("unit", "steps"), [("step", 7), ("epoch", 3)])
@pytest.mark.parametrize("opt", ["sgd", "momentum", "adam"])
def test_one_client_equals_a_plain_torch_loop(unit: str, steps: int, opt: str) -> None:
    data = federation((11,))
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    ours = {"sgd": SGD(0.05), "momentum": SGD(0.05, 0.9), "adam": Adam(0.05)}[opt]
    model = network(net, likelihood=normal(1.0))
    method = fedavg(model, optimizer=ours, steps=steps, unit=unit, batch_size=4)  # type: ignore[arg-type]
    fitted = fit(method, data, rounds=2, seed=3)
    for round_ in range(2):
        moving = list(net.parameters())
        theirs: torch.optim.Optimizer
        if opt == "adam":
            theirs = torch.optim.Adam(moving, 0.05)
        else:
            theirs = torch.optim.SGD(moving, 0.05, momentum=0.9 if opt == "momentum" else 0.0)
        phase = Phase(lambda lane, message, batch: lane, steps, unit, 4)  # type: ignore[arg-type]
        index, inside, active = row_plan(data, torch.tensor([0]), phase, seed=3, at=(round_, 0))
        assert bool(active.all())
        for rows, there in zip(index[:, 0], inside[:, 0], strict=True):
            chosen = rows[there]
            residual = net(data.fields["x"][chosen])[:, 0] - data.fields["y"][chosen]
            theirs.zero_grad()
            (0.5 * residual.square().mean()).backward()
            theirs.step()
    for name, value in net.named_parameters():
        assert torch.allclose(fitted.message[f"theta.{name}"], value, atol=1e-12), name


def test_fedprox_equals_fedavg_at_prox_0_and_stays_at_a_large_prox() -> None:
    data = federation((5, 3, 7))
    model = network(torch.nn.Linear(2, 1), likelihood=normal(1.0))
    how: dict[str, Any] = {"optimizer": SGD(0.01), "steps": 4, "batch_size": 2}
    plain, none, strong = (
        fit(fedavg(model, prox=prox, **how), data, rounds=3, seed=2) for prox in (0.0, 1e-300, 90.0)
    )
    start = plain.program.start()[0]
    for name, value in plain.message.items():
        assert torch.allclose(value, none.message[name], atol=1e-14)
        # the proximal term is 0 at the first of four steps; with lr * prox = 0.9 the rest nearly undo it
        assert (strong.message[name] - start[name]).norm() < 0.6 * (value - start[name]).norm()
    assert (plain.method.name, strong.method.name) == ("fedavg", "fedprox")


def test_means_are_weighted_by_rows_and_a_single_client_gives_its_own_copy() -> None:
    twice = ClientData.from_clients(
        {k: {n: v for n, v in clients().select([k]).fields.items()} for k in "abc"}
    )
    method = fedavg(at(START), optimizer=SGD(LR), steps=3, batch_size=None)
    one = fit(method, twice, rounds=1)
    c = powers(H, 3)
    expected = (P[:, None] * (B + (c @ (START - B)[..., None])[..., 0])).sum(0)
    assert torch.allclose(theta(one), expected, atol=1e-13)
    uniform = (UNIFORM[:, None] * (B + (c @ (START - B)[..., None])[..., 0])).sum(0)
    assert not torch.allclose(theta(one), uniform, atol=1e-2)
    alone = theta(fit(method, twice, rounds=1, cohort=1, seed=1))
    copies = B + (c @ (START - B)[..., None])[..., 0]
    assert float((copies - alone).abs().amax(1).min()) < 1e-13
