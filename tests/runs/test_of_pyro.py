"""What a user of Pyro asks a fit for is answered by the name that it has here."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

import hierfl
from hierfl import ClientBatch
from tests.programs import means, normal_rows


def nested(batch: ClientBatch) -> None:
    """A plate within clients, and a vector of each."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with batch.clients():
        pair = pyro.sample("pair", dist.Normal(mu, 1.0).to_event(1))
        with pyro.plate("wards", 4, dim=-3):
            ward = pyro.sample("ward", dist.Normal(pair[..., 0], 1.0))
        with batch.data():
            normal_rows(batch, ward.sum(0) + pair[..., 1])


@pytest.mark.parametrize("program", [means, nested])
def test_pyros_predictive_takes_the_samples(program: Callable[[ClientBatch], None]) -> None:
    data = hierfl.ClientData.from_arrays(["a", "a", "b"], y=torch.tensor([0.1, 0.5, -0.3]))
    fit = hierfl.fit(program, data, seed=0)
    samples, rows = fit.get_samples(draws=400), hierfl.full_batch(data)
    drawn = Predictive(pyro.poutine.uncondition(program), samples, return_sites=("y", *samples))
    predicted = drawn(rows)
    of_rows = predicted["y"].reshape(400, 2, 2)[:, rows.mask()]
    for name, value in samples.items():
        assert torch.equal(predicted[name].reshape(value.shape), value)
    expected = fit.predict(data, draws=400).mean.flatten()
    away = (of_rows.mean(0) - expected) / of_rows.std(0)
    assert float(away.abs().max()) < 0.3
