"""Programs without global sites: each client's posterior is its own, and exact where it is known."""

from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from tests.programs import leveled

normal = leveled(
    lambda batch, w: pyro.sample("y", dist.Normal(w, 0.5), obs=batch.y),
    lambda batch: dist.Normal(1.0, 2.0),
)


@pytest.mark.parametrize("new", [False, True])
def test_normal_means_are_exact_also_as_loaded(new: bool, tmp_path: Path) -> None:
    y = torch.tensor([0.3, -0.2, 0.5, 2.0, 1.5])
    data = hierfl.ClientData.from_arrays(["a", "a", "a", "b", "b"], y=y)
    fit: Any = hierfl.fit(normal, data, seed=0)
    if new:
        fit = fit.personalize(hierfl.ClientData.from_arrays(["c", "c", "d"], y=y[:3]))
    counts = fit.federation.data.counts
    by_client = fit.federation.data.fields["y"].split(counts.tolist())
    sums = torch.stack([rows.sum() for rows in by_client])
    precision = 0.25 + 4.0 * counts
    own = fit.draws(4000).own["w"].squeeze()
    assert torch.allclose(own.mean(0), (0.25 + 4.0 * sums) / precision, atol=0.03)
    assert torch.allclose(own.std(0) * precision.sqrt(), torch.ones(len(counts)), atol=0.05)
    fit.save(tmp_path)
    again = hierfl.load(tmp_path, data=fit.federation.data, model=normal)
    assert torch.equal(again.draws(50).own["w"], fit.draws(50).own["w"])
