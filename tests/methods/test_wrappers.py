"""Wrappers of a method: what they change, equal in two engines, refused by name where they mean nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import models
from hierfl.core.trees import tree_leaves
from hierfl.methods import (
    averaging_some,
    by_rows,
    ditto,
    fedabml,
    fedavg,
    fine_tuned,
    local_only,
    over_relaxed,
    pfedbred,
    pfedme,
    server_optimized,
)
from hierfl.optimizers import SGD
from tests.methods.cases import units
from tests.methods.quadratics import START, at, clients, theta
from tests.programs import federation, fit

SMALL: dict[str, Any] = {"steps": 2, "batch_size": 2}
FEW: dict[str, Any] = {"unit": "step", "batch_size": 2}


def common() -> Any:
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2]])), module.bias.fill_(0.1)
    return models.network(module, likelihood=models.likelihood.normal(1.0))


def model_for(make: Any) -> Any:
    """Return the network that a method takes: pfedme's has weights of each client's own."""
    return units() if make is pfedme else common()


@pytest.mark.parametrize("make", [fedavg, ditto, pfedme, pfedbred])
def test_over_relaxation_multiplies_the_step_by_beta_and_factors_multiply(make: Any) -> None:
    method = make(at(START, personal=make in (pfedme, pfedbred)), steps=3, batch_size=None)
    moves = {
        beta: theta(fit(over_relaxed(method, beta), clients(), rounds=1)) - START
        for beta in (0.0, 1.0, 3.0)
    }
    twice = over_relaxed(over_relaxed(method, 2.0), 1.5)
    assert torch.equal(moves[0.0], torch.zeros(2))
    assert torch.allclose(theta(fit(method, clients(), rounds=1)) - START, moves[1.0], atol=1e-14)
    assert torch.allclose(moves[3.0], 3.0 * moves[1.0], atol=1e-12)
    assert torch.allclose(theta(fit(twice, clients(), rounds=1)) - START, moves[3.0], atol=1e-12)


def test_a_server_optimizer_takes_the_methods_change_for_a_gradient() -> None:
    """Two rounds of heavy-ball momentum by hand."""
    method = fedavg(at(START), steps=3, batch_size=None)

    def after(start: Tensor) -> Tensor:
        return theta(fit(fedavg(at(start), steps=3, batch_size=None), clients(), rounds=1))

    one = START + 0.7 * (after(START) - START)
    velocity = 0.9 * (START - after(START)) + (one - after(one))
    fitted = fit(server_optimized(method, SGD(0.7, 0.9)), clients(), rounds=2)
    assert torch.allclose(theta(fitted), one - 0.7 * velocity, atol=1e-12)
    assert fitted.method.name == "fedavg+opt"


@pytest.mark.parametrize("make", [pfedme, pfedbred, fedabml])
def test_by_rows_weights_the_clients_copies_by_rows(make: Any) -> None:
    scale = {"guide": hierfl.guides.delta, "draws": 1} if make is fedabml else {}
    method = make(at(START, personal=True), steps=2, batch_size=None, **scale)
    alone = torch.stack(
        [theta(fit(method, clients().select([k]), rounds=1)) for k in clients().names]
    )
    uniform, weighted = (fit(m, clients(), rounds=1) for m in (method, by_rows(method)))
    rows = clients().counts.double()
    assert torch.allclose(theta(uniform), alone.mean(0), atol=1e-12)
    assert torch.allclose(theta(weighted), (rows / rows.sum()) @ alone, atol=1e-12)


@pytest.mark.parametrize("make", [fedavg, pfedme, ditto])
def test_all_clients_train_some_are_averaged_and_the_loss_is_over_all(make: Any) -> None:
    data = federation((5, 3, 7, 2, 4))
    method = make(model_for(make), steps=2, batch_size=None)
    whole = fit(method, data, rounds=1, seed=5)
    some, none = (fit(averaging_some(method, share=s), data, rounds=1, seed=5) for s in (0.5, 1e-9))
    tables = (tree_leaves(f.progress.table) for f in (whole, some))
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))
    assert whole.history["loss"][0] == some.history["loss"][0]
    for name, value in whole.message.items():
        assert torch.allclose(none.message[name], value, atol=1e-10), (
            "where no client is drawn, all are averaged"
        )
        assert not torch.allclose(some.message[name], value, atol=1e-6)


@pytest.mark.parametrize("when", ["adapting", "every round"])
@pytest.mark.parametrize("make", [fedavg, ditto, pfedme])
def test_training_does_not_depend_on_fine_tuning(make: Any, when: Any) -> None:
    data, method = federation((5, 3, 7)), make(model_for(make), **SMALL)
    tuned_method = fine_tuned(method, steps=3, when=when, optimizer=SGD(0.05), **FEW)
    plain, tuned = (fit(m, data, rounds=2, seed=1) for m in (method, tuned_method))
    for name, value in plain.message.items():
        assert torch.equal(tuned.message[name], value)
    same = torch.equal(tuned.predict(data, draws=1).mean, plain.predict(data, draws=1).mean)
    assert same == (when == "adapting")
    for rounds in (1, 2):
        joined = (f.personalize(data, rounds=rounds) for f in (plain, tuned))
        before, after = (f.predict(data, draws=1).scores().log_score.mean() for f in joined)
        assert after > before


@pytest.mark.parametrize("make", [ditto, pfedme, local_only])
def test_what_the_last_round_left_is_tuned_as_at_the_end_of_that_round(make: Any) -> None:
    data, method = federation((5, 3, 7)), make(model_for(make), **SMALL)
    how: dict[str, Any] = {"steps": 3, "unit": "step", "batch_size": None, "optimizer": SGD(0.05)}
    after, within = (
        fit(fine_tuned(method, **when, **how), data, rounds=2, seed=1)
        for when in ({"own_steps": False}, {"when": "every round"})
    )
    tuned = after.personalize(data, rounds=1, from_scratch=False).predict(data, draws=1).mean
    assert torch.allclose(tuned, within.predict(data, draws=1).mean, atol=1e-10)
    assert not torch.allclose(tuned, after.predict(data, draws=1).mean, atol=1e-6)
    from_start = after.personalize(data, rounds=1).predict(data, draws=1).mean
    assert not torch.allclose(tuned, from_start, atol=1e-6)
