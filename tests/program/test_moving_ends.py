"""Observed sites that end where latent ones say, and labels beyond their starting values."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl.data.batch import ClientBatch
from hierfl.program.program import ProgramError

TIMES = torch.tensor([0.4, 0.5, 0.9, 2.5, 0.6, 0.7])
DATA = hierfl.ClientData.from_arrays(["a", "a", "a", "a", "b", "b"], y=TIMES)


def shifted(prior: Any) -> Any:
    def model(batch: ClientBatch) -> None:
        shift = pyro.sample("shift", prior)
        with batch.clients():
            loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
            with batch.data():
                base = dist.LogNormal(loc, 1.0)
                moved = dist.transforms.AffineTransform(shift, 1.0)
                pyro.sample("y", dist.TransformedDistribution(base, moved), obs=batch.y)

    return model


def limited(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.Pareto(1.0, 1.0))
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Uniform(0.0, top), obs=batch.y)


def by_row(batch: ClientBatch) -> None:
    top = pyro.sample("top", dist.HalfNormal(1.0))
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with batch.data():
            pyro.sample("y", dist.Uniform(torch.zeros_like(batch.y), top), obs=batch.y)


@pytest.mark.parametrize("model", [shifted(dist.HalfNormal(1.0)), limited, by_row])
def test_labels_beyond_the_starting_values_are_said_with_the_fix(model: Any) -> None:
    with pytest.raises(
        ProgramError, match=r"ends at the starting values .* Uniform\(0\.0, least\)"
    ):
        hierfl.read(model, hierfl.guides.delta, DATA)


def test_a_shift_whose_prior_ends_at_the_labels_is_read() -> None:
    least = float(TIMES.min())
    hierfl.read(shifted(dist.Uniform(0.0, least)), hierfl.guides.delta, DATA)
