"""Compiled steps of FedRep, FedBABU, FedRecon and APFL, and runs that are resumed, give the numbers
of plain runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import hierfl
from hierfl import methods, models
from hierfl.core.trees import named_leaves
from hierfl.data.batch import ClientBatch
from hierfl.method import Method
from hierfl.models.likelihood import bernoulli
from hierfl.optimizers import SGD, Adam
from tests.programs import federation, fit


def convolutional() -> Any:
    """A small convolutional network on the two features, with group normalization."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.Conv1d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 1),
    )
    return models.network(module, likelihood=bernoulli(), y="ill")


@hierfl.model
def line_of_each(batch: ClientBatch) -> None:
    """A common slope, and an intercept of each client under no prior: a regression split
    by plate.
    """
    slope = pyro.param("slope", torch.zeros(2))
    with batch.clients():
        level = pyro.param("level", torch.zeros(batch.num_clients, 1))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * slope).sum(-1) + level, 1.0), obs=batch.y)


Make = Callable[[Any, dict[str, Any]], Method]
METHODS: dict[str, Make] = {
    "apfl": lambda model, _: methods.apfl(
        model, adaptive=True, optimizer=SGD(0.05, 0.5), steps=3, batch_size=2
    ),
    "fedbabu": lambda model, split: methods.fedbabu(
        model, **split, optimizer=SGD(0.05, 0.9), batch_size=2
    ),
    "fedper": lambda model, split: methods.fedrep(model, **split, joint=True, batch_size=2),
    "fedrecon": lambda model, split: methods.fedrecon(
        model, **split, body_optimizer=SGD(0.05), server_optimizer=Adam(0.05), batch_size=2
    ),
    "fedrep": lambda model, split: methods.fedrep(model, **split, head_steps=2, batch_size=2),
}
LAST: dict[str, Any] = {"head": "theta.5."}


def apart(one: Any, other: Any) -> float:
    a, b = named_leaves(one), named_leaves(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def states(fitted: hierfl.Fit) -> tuple[Any, Any]:
    return fitted.progress.server, fitted.progress.table


@pytest.mark.slow
@pytest.mark.skipif("HIERFL_SLOW" not in os.environ, reason="compiles ten steps: about two minutes")
@pytest.mark.parametrize("name", METHODS)
def test_compiled_steps_of_a_convolutional_network(name: str) -> None:
    data, method = federation((5, 3, 7, 1, 2)), METHODS[name](convolutional(), LAST)
    eager, compiled = (
        hierfl.fit(method, data, rounds=3, settings=hierfl.Settings(compile=c))
        for c in (False, True)
    )
    assert apart(states(eager), states(compiled)) < 1e-10


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_where_it_was_interrupted(name: str, tmp_path: Path) -> None:
    data, method = federation((5, 3, 7, 1, 2)), METHODS[name](convolutional(), LAST)
    run: dict[str, Any] = {"rounds": 4, "cohort": 3, "checkpoint": tmp_path, "checkpoint_every": 2}
    whole = fit(method, data, **run)
    shutil.rmtree(max(tmp_path.glob("round-*")))
    resumed = fit(method, data, **run, resume=True)
    assert apart(states(whole), states(resumed)) == 0.0


@pytest.mark.parametrize("name", [name for name in METHODS if name != "apfl"])
def test_a_regression_split_by_plate_is_remade_and_fits(name: str, tmp_path: Path) -> None:
    """Levels of -2, 0 and 2 about a common slope; the run is loaded from its folder."""
    data = federation((20, 20, 20))
    level = torch.tensor([-2.0, 0.0, 2.0])
    data = data.with_fields(y=data.fields["x"].sum(-1) + level[data.row_client])
    method = METHODS[name](line_of_each, {})
    fit(method, data, rounds=10, checkpoint=tmp_path)
    fitted = hierfl.load(tmp_path, data=data)
    assert set(fitted.message) == {"slope"}, "the level is each client's"
    new = fitted.personalize(data, rounds=10)
    own: Tensor = new.progress.table["w" if name == "fedbabu" else "head"]["level"]
    assert torch.allclose(own.flatten(), level, atol=0.4)
    assert float(new.predict(data, draws=1).scores().log_score.mean()) > -1.3  # -0.92 at best
