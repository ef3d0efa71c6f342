"""FedRep, FedPer, FedBABU and FedRecon of a regression that is split by plate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl import methods
from hierfl.data.batch import ClientBatch
from hierfl.method import Method
from hierfl.optimizers import SGD, Adam
from tests.programs import federation, fit
from tests.sampled import sampled


@hierfl.model
def line_of_each(batch: ClientBatch) -> None:
    """A common slope, and an intercept of each client under no prior: a regression split by plate."""
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


@pytest.mark.slow("fedrecon")
@pytest.mark.parametrize("name", sampled([name for name in METHODS if name != "apfl"], 2))
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
    table = new.progress.table
    own: Tensor = (table.extra if name == "fedbabu" else table).params["level"]
    assert torch.allclose(own.flatten(), level, atol=0.4)
    assert float(new.predict(data, draws=1).scores().log_score.mean()) > -1.3  # -0.92 at best
