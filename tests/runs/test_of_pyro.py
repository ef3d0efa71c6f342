"""What a user of Pyro asks a fit for is answered by the name that it has here."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

import hierfl
from hierfl.data.batch import ClientBatch


def model(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with batch.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def test_pyros_names_name_the_nearest() -> None:
    data = hierfl.ClientData.from_arrays(["a", "a", "b"], y=torch.tensor([0.1, 0.5, -0.3]))
    fit = hierfl.fit(model, data, seed=0)
    with pytest.raises(AttributeError, match=r"'get_samples': it is fit.draws\(\)"):
        fit.get_samples()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'quantiles': it is fit.summary\(\)"):
        fit.quantiles([0.1])  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'postirior'$"):
        _ = fit.postirior  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"fit.predict\(rows\)"):
        Predictive(model, guide=fit, num_samples=2)(hierfl.full_batch(data))
