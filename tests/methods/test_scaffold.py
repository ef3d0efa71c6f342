"""SCAFFOLD: the optimum of the clients' losses after any number of local steps, its rounds, and its reductions."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import models
from hierfl.methods import over_relaxed, scaffold
from hierfl.optimizers import SGD
from tests.methods.quadratics import START, UNIFORM, B, H, P, at, clients, stationary
from tests.programs import federation, fit

LR = 0.1
FULL: dict[str, Any] = {"steps": 5, "batch_size": None}


def theta(fitted: hierfl.Fit) -> Tensor:
    value: Tensor = fitted.message["theta"]["theta"]
    return value


def run(rounds: int, start: Tensor = START, **options: Any) -> hierfl.Fit:
    cohort, seed = options.pop("cohort", None), options.pop("seed", 0)
    method = scaffold(at(start), **{"optimizer": SGD(LR), **FULL, **options})
    return fit(method, clients(), rounds=rounds, cohort=cohort, seed=seed)


def gradients(w: Tensor) -> Tensor:
    return (H @ (w - B)[..., None])[..., 0]


@pytest.mark.parametrize(
    ("weights", "optimum"), [("uniform", (0.313253, 0.807229)), ("rows", (0.509413, 0.591362))]
)
def test_it_reaches_the_optimum(weights: str, optimum: tuple[float, float]) -> None:
    p = P if weights == "rows" else UNIFORM
    best = stationary(p[:, None, None] * H)
    assert best.tolist() == pytest.approx(optimum, abs=1e-6)
    fitted = run(30, weights=weights)
    assert torch.allclose(theta(fitted), best, atol=1e-6, rtol=0.0)
    corrections = fitted.progress.table.params["theta"]
    assert torch.allclose(corrections, gradients(best), atol=1e-5), "the clients' own gradients"


def test_first_rounds() -> None:
    assert theta(run(1)).tolist() == pytest.approx((1.943989, -0.327935), abs=1e-6)
    assert theta(run(2)).tolist() == pytest.approx((1.234597, 0.380919), abs=1e-6)
    away = (theta(run(10)) - stationary(UNIFORM[:, None, None] * H)).abs().max()
    assert float(away) == pytest.approx(0.0037, abs=5e-5)


@pytest.mark.slow("uniform")
@pytest.mark.parametrize("weights", ["uniform", "rows"])
def test_cohorts_reach_the_same_optimum(weights: str) -> None:
    p = P if weights == "rows" else UNIFORM
    fitted = run(35, weights=weights, cohort=2)
    best = stationary(p[:, None, None] * H)
    assert torch.allclose(theta(fitted), best, atol=2e-3, rtol=0.0)


@pytest.mark.parametrize("weights", ["uniform", "rows"])
@pytest.mark.parametrize("cohort", [None, 2])
def test_the_servers_correction_is_the_clients_mean(weights: str, cohort: int | None) -> None:
    p = P if weights == "rows" else UNIFORM
    fitted = run(7, weights=weights, cohort=cohort)
    mean = (p[:, None] * fitted.progress.table.params["theta"]).sum(0)
    assert torch.allclose(fitted.message["c"]["theta"], mean, atol=1e-12)
    assert float(mean.norm()) > 1e-3


def test_before_all_have_joined_the_others_count_as_zero() -> None:
    fitted = run(1, cohort=2)
    mean = fitted.progress.table.params["theta"].sum(0) / 3.0
    assert torch.allclose(fitted.message["c"]["theta"], mean, atol=1e-14)


def test_the_corrections_are_the_mean_gradients_of_the_steps_that_each_client_took() -> None:
    """Three passes of 3, 2 and 4 mini-batches; the first round's steps are FedAvg's, without one."""
    model = models.network(torch.nn.Linear(2, 1), likelihood=models.likelihood.normal(1.0))
    method = scaffold(
        model, optimizer=SGD(0.05), weights="rows", steps=3, unit="epoch", batch_size=2
    )
    ours = fit(method, federation((5, 3, 7)), rounds=1, seed=2)
    counts, taken = torch.tensor([5.0, 3.0, 7.0]), torch.tensor([9.0, 6.0, 12.0])
    for name, start in ours.program.start()[0].items():
        c = ours.progress.table.params[name].flatten(1)
        whole = -(counts / 15.0 * 0.05 * taken) @ c
        moved = ours.message["theta"][name] - start
        assert torch.allclose(whole, moved.flatten(), atol=1e-12)


def test_the_servers_step_size() -> None:
    whole, half = (theta(run(1, server_optimizer=SGD(by))) - START for by in (1.0, 0.5))
    assert torch.allclose(half, 0.5 * whole, atol=1e-14)
    method = over_relaxed(
        scaffold(at(START), optimizer=SGD(LR), server_optimizer=SGD(0.25), **FULL), 2.0
    )
    assert torch.allclose(
        theta(fit(method, clients(), rounds=3)), theta(run(3, server_optimizer=SGD(0.5)))
    )
