"""A program's own plates in the place of the batch's are named, with what to open."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl.data.batch import ClientBatch
from hierfl.program.program import ProgramError
from hierfl.program.read import read_model


def beside_the_batchs(batch: ClientBatch) -> None:
    with pyro.plate("clients", batch.num_clients):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with batch.clients(), batch.data():
        pyro.sample("y", dist.Normal(a[:, None], 1.0), obs=batch.y)


def of_a_fixed_size(batch: ClientBatch) -> None:
    with pyro.plate("counties", 6):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 10):
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def within_clients(batch: ClientBatch) -> None:
    with batch.clients():
        with pyro.plate("k", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a.sum(0) * batch.y, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (beside_the_batchs, r"stands beside batch.clients\(\): open `with batch.clients\(\):`"),
        (of_a_fixed_size, r"'data', of 10, is not the batch's own: open `with batch.data\(\):`"),
        (within_clients, "a plate inside them, such as 'k' of 3, dim=-3"),
    ],
)
def test_own_plates_are_named(model: Any, words: str) -> None:
    client = [f"c{k // 10}" for k in range(60)]
    data = hierfl.ClientData.from_arrays(client, y=torch.zeros(60))
    with pytest.raises(ProgramError, match=words):
        read_model(model, data)
