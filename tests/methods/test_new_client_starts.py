"""Where a new client of each method starts, `personalize(rows, rounds=0)`: where the server says.

Two properties, of every method and wrapper. A new client's params are a function of what the server
sends: module weights that no client trained do not reach it. And they are those that training left.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.engine.federation import federate
from hierfl.engine.rounds import begin
from tests.methods import cases
from tests.methods.cases import CASES, one_of_each
from tests.programs import federation, fit, logistic, regression


def row(table: Any, k: int) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v[k], table)


def started(fitted: hierfl.Fit) -> dict[str, Tensor]:
    """Return every param of a new client before it uses a row."""
    new = fitted.personalize(federation((4,), seed=8), rounds=0)
    return named_leaves(new.federation.client.params(new.message, row(new.progress.table, 0)))


@pytest.mark.slow("fedep", "bfi", "pvi", "pvi renyi")
@pytest.mark.parametrize("name", one_of_each(CASES, "bfi", "fedep", "pvi"))
def test_new_clients_start_at_the_servers_word(name: str) -> None:
    data = federation((5, 3, 7, 2))  # a batch norm needs two rows
    fitted = fit(CASES[name].make(), data, rounds=1)
    trained = started(fitted)
    begun = begin(fitted.federation)
    untrained = started(hierfl.Fit(fitted.method, fitted.federation, begun, 1))
    same = all(torch.equal(value, untrained[path]) for path, value in trained.items())
    assert same == (name in ("local_only", "batch_normed local_only"))

    if fitted.method.model in (logistic, regression):
        return  # of no module
    # the same server, but a module with other weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "SEED", 4)
        other = federate(CASES[name].make(), data)
    before = replace(begin(other), server=fitted.progress.server, round=1)
    again = started(hierfl.Fit(fitted.method, other, before, 1))
    assert trained and again.keys() == trained.keys()
    for path, value in trained.items():
        if name != "fedbn" or "norm" not in path:  # fedbn's layers of norm are the client's own
            assert torch.equal(again[path], value), path


@pytest.mark.parametrize(
    "name",
    [
        *("apfl", "ditto", "fedabml", "fedamp", "fedfomo", "fedmap", "fedpop", "fedrecon"),
        *("fedrep", "heur_fedamp", "ifca", "pfedbayes", "pfedbred", "pfedme"),
    ],
)
def test_a_client_that_was_in_no_round_is_served_the_same(name: str) -> None:
    """`fit` with cohorts of one: the clients that were never drawn are where new ones start."""
    fitted = fit(CASES[name].make(), federation(), rounds=1, cohort=1)
    client = fitted.federation.client
    assert client.seen is not None
    begun = torch.vmap(client.seen)(fitted.progress.table)
    assert begun.tolist().count(1.0) == 1
    served = client.params(fitted.message, row(fitted.progress.table, int(begun.argmin())))
    for param, value in started(fitted).items():
        assert torch.equal(named_leaves(served)[param], value), param


@pytest.mark.parametrize("name", ["pfedbayes", "fedabml"])
def test_the_posterior_of_a_new_client_is_its_prior(name: str) -> None:
    """Of the methods whose clients begin at theta, means and scales."""
    fitted = fit(CASES[name].make(), federation(), rounds=2)
    params, link = started(fitted), torch.nn.functional.softplus
    loc, scale = (fitted.message[f"{part}.0.weight"].flatten() for part in ("theta", "scale"))
    assert torch.equal(params["['w.0.weight.loc']"].flatten(), loc)
    assert torch.allclose(link(params["['w.0.weight.scale']"]).flatten(), link(scale))
