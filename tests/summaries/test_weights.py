"""Draws about weighted ones where a client's weights are heavy: a client without events alone in its region."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import hierfl
from hierfl import ClientBatch, ClientData
from hierfl.methods.stages.weighting import MOST_PROPOSED
from hierfl.program.sites import Model
from hierfl.summaries import weights
from hierfl.summaries.weights import is_heavy
from tests.programs import fit

REGION = torch.tensor([0, 0, 0, 1, 1, 1, 2])
COUNTS = torch.tensor([6] * 6 + [3])
EVENTS = torch.tensor([3] * 6 + [0])


def test_a_heavy_client_has_a_large_weight_and_a_heavy_tail() -> None:
    log_ratios = torch.zeros(1000, 3)
    log_ratios[0] = torch.tensor([3.0, 3.0, 0.5])
    assert is_heavy(torch.tensor([0.5, 0.1, 0.9]), log_ratios).tolist() == [True, False, False]


def test_the_error_of_weighted_sds_is_that_of_many_replications() -> None:
    g = torch.Generator().manual_seed(0)
    draws = 1.3 * torch.randn(400, 500, 2, generator=g, dtype=torch.float64)
    log_w = (-0.5 * draws[..., 0].square() * (1.0 - 1.3**-2)).log_softmax(1)
    mean = torch.einsum("rs,rsk->rk", log_w.exp(), draws)
    sds = torch.einsum("rs,rsk->rk", log_w.exp(), (draws - mean[:, None]).square()).sqrt()
    known = sds.std(0) / sds.mean(0)
    told = torch.stack([weights.error_of_sds(*one) for one in zip(draws, log_w, strict=True)])
    torch.testing.assert_close(told.mean(0), known, rtol=0.1, atol=0.0)


def test_one_draw_that_makes_up_most_of_a_variance_shows() -> None:
    draws = torch.zeros(2000, 2).normal_(generator=torch.Generator().manual_seed(0))
    draws[7, 1] = 50.0  # as far as 2,500 draws 1 sd away
    error = weights.error_of_sds(draws, torch.full((2000,), -math.log(2000.0)))
    assert float(error[0]) < 0.02 and float(error[1]) > 0.25


def by_region(batch: ClientBatch) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.5))
    region = pyro.sample("region", dist.Normal(torch.zeros(3), tau).to_event(1))
    with batch.clients():
        own = pyro.sample("own", dist.Normal(mu + region[batch.region.long()], 0.3))
        with batch.data():
            pyro.sample("y", dist.Bernoulli(logits=own), obs=batch.y)


def people() -> ClientData:
    which = torch.repeat_interleave(torch.arange(7), COUNTS)
    y = torch.cat([torch.arange(n) < k for n, k in zip(COUNTS, EVENTS, strict=True)])
    return ClientData.from_arrays(
        which,
        names=[f"c{k}" for k in range(7)],
        client_fields={"region": REGION},
        y=y.to(torch.get_default_dtype()),
    )


def last_region() -> tuple[float, float]:
    """Return mean and sd of the last region's effect: 2^17 quasi-random draws of the prior, weighted by the rows."""
    points = torch.quasirandom.SobolEngine(5, scramble=True, seed=0).draw(1 << 17)
    uniform = points.double().clamp(1e-9, 1.0 - 1e-9)
    normal = torch.special.ndtri(uniform)
    tau = 2.5 * torch.special.ndtri(0.5 + 0.5 * uniform[:, 1])
    region = tau[:, None] * normal[:, 2:]
    nodes, weights = (torch.as_tensor(v) for v in np.polynomial.hermite_e.hermegauss(24))
    own = (normal[:, :1] + region[:, REGION])[..., None] + 0.3 * nodes
    log_p = (
        EVENTS[:, None] * own.sigmoid().log() + (COUNTS - EVENTS)[:, None] * (-own).sigmoid().log()
    )
    each = (log_p.exp() @ (weights / weights.sum())).log().sum(1)
    share = each.softmax(0)
    mean = share @ region[:, 2]
    return float(mean), float((share @ (region[:, 2] - mean).square()).sqrt())


def with_unused(batch: ClientBatch) -> None:
    """As `by_region`, with as many unknowns as factors are tempered for."""
    pyro.sample("unused", dist.Normal(torch.zeros(MOST_PROPOSED), 1.0).to_event(1))
    by_region(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "again"),
    [
        (with_unused, True),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in ((by_region, True), (with_unused, False))
        ),
    ],
)
def test_a_client_without_events_alone_in_its_region(
    model: Model, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not again:
        monkeypatch.setattr(weights, "HEAVY", math.inf)
    mean, sd = last_region()
    found = fit(hierfl.methods.two_stage(model), people(), seed=3)
    region = found.draws(4000).shared["region"].view(4000, 3)[:, 2]
    ratio = float(region.std()) / sd
    if again:
        assert len(found.history) <= 6 and found.history["k_hat"].iloc[-1] < 0.7
        assert abs(float(region.mean()) - mean) < 0.05 * sd and 0.9 < ratio < 1.1
    else:  # what other draws fix
        assert ratio < 0.85
