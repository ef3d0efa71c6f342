"""Local sites that are not Normal are refused by name, and what the message advises can be done."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import guides
from hierfl.data.batch import ClientBatch
from hierfl.methods import fedsvi, two_stage
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model
from tests.programs import federation, fit


@hierfl.model
def student(batch: ClientBatch) -> None:
    """Student t intercepts."""
    mu, tau = _above()
    with batch.clients():
        a = pyro.sample("a", dist.StudentT(3.0, mu, tau))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


@hierfl.model
def horseshoe(batch: ClientBatch) -> None:
    """Normal intercepts with a scale of each client's own."""
    mu, tau = _above()
    with batch.clients():
        lam = pyro.sample("lam", dist.HalfCauchy(torch.ones(())))
        a = pyro.sample("a", dist.Normal(mu, tau * lam))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


@hierfl.model
def two_levels(batch: ClientBatch) -> None:
    """Local sites that are all Normal or LogNormal, but the spread of one is the value of another."""
    mu, tau = _above()
    with batch.clients():
        lam = pyro.sample("lam", dist.LogNormal(torch.zeros(()), 1.0))
        a = pyro.sample("a", dist.Normal(mu, tau * lam))
        with batch.data():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def _above() -> tuple[torch.Tensor, torch.Tensor]:
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    return mu, pyro.sample("tau", dist.HalfNormal(1.0))


@pytest.mark.parametrize(
    ("model", "site", "why"),
    [
        (student, "a", "its prior is a StudentT"),
        (horseshoe, "lam", "its prior is a HalfCauchy"),
        (two_levels, "a", "its spread depends on another local site"),
    ],
)
def test_two_stage_refuses_them_by_name_and_the_advised_method_fits_them(
    model: Model, site: str, why: str
) -> None:
    data = federation()
    with pytest.raises(
        ProgramError,
        match=f"local site '{site}' .* two_stage: {why}.*fedsvi with guides.structured",
    ):
        fit(two_stage(model), data, rounds=3)
    found = fit(fedsvi(model, guides.structured), data, rounds=2)
    assert found.history["elbo"].notna().all()
