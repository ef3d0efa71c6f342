"""A local site with a covariance of low rank is Normal, and one exact round suffices for Gaussian rows."""

import pyro
import pyro.distributions as dist
import torch

from hierfl import ClientBatch
from hierfl.methods.stages.two_stage import seen_in
from tests.summaries.programs import program_of


def low_rank(batch: ClientBatch) -> None:
    root = pyro.sample("root", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    with batch.clients():
        w = pyro.sample("w", dist.LowRankMultivariateNormal(root, root[:, None], scale))
        with batch.data():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 1.0), obs=batch.y)


def test_it_is_seen_as_normal() -> None:
    hierarchy = seen_in(program_of(low_rank)).hierarchy
    assert hierarchy.mixing is None and hierarchy.normal_size == 2
