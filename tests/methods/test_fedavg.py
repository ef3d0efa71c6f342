"""FedAvg and FedProx: closed-form fixed points, a plain torch loop, and equalities between methods."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hierfl import Phase
from hierfl.methods import fedavg, over_relaxed
from hierfl.models import network
from hierfl.models.likelihood import normal
from hierfl.optimizers import SGD, Adam
from tests.methods.quadratics import I2, START, H, P, at, clients, stationary, theta
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
    away = fit(over_relaxed(fedavg(at(START), **options), beta), clients(), rounds=max(12, 40 // m))
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
