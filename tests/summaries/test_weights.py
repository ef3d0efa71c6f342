"""Wider draws where a client's weights are heavy: closed forms, and a client without events alone in its region."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.summaries import weights
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.weights import combined, is_heavy, powers_of, raised
from tests.programs import fit

REGION = torch.tensor([0, 0, 0, 1, 1, 1, 2])
COUNTS = torch.tensor([6] * 6 + [3])
EVENTS = torch.tensor([3] * 6 + [0])


# ---------------------------------------------------------------------------------------- the parts
def log_normal(x: Tensor, mean: float, sd: float) -> Tensor:
    return -0.5 * ((x - mean) / sd).square() - math.log(sd)


def test_two_sets_of_draws_together_have_the_moments_of_the_target() -> None:
    g = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 20_000, generator=g)
    x = torch.cat([first, 3.0 * second])
    # the constants of the three densities are unknown to `combined`
    densities = (log_normal(x, 0.0, 1.0) + 50.0, log_normal(x, 0.0, 3.0) - 20.0)
    log_weights = combined(*densities, log_normal(x, 1.0, 2.0) + 7.0)
    weights = (log_weights - log_weights.logsumexp(0)).exp()
    assert abs(float(weights @ x) - 1.0) < 0.05
    assert abs(float(weights @ (x - 1.0).square()) - 4.0) < 0.15


def test_two_sets_from_one_density_are_one_set() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    log_q, log_target = log_normal(x, 0.0, 1.0), log_normal(x, 0.2, 1.0)
    found = combined(log_q, log_q + 3.0, log_target)
    assert torch.allclose(found - found.mean(), (log_target - log_q) - (log_target - log_q).mean())


def test_a_heavy_client_has_a_large_weight_and_a_heavy_tail() -> None:
    log_ratios = torch.zeros(1000, 3)
    log_ratios[0] = torch.tensor([3.0, 3.0, 0.5])
    assert is_heavy(torch.tensor([0.5, 0.1, 0.9]), log_ratios).tolist() == [True, False, False]


def test_the_power_is_the_least_that_leaves_draws_effective() -> None:
    """q2 = Normal(0, 1 / power) about p = q1: a share sqrt(2 power - power^2) of its draws is effective."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    heavy, equal = torch.tensor([False, True]), torch.full((len(x),), -math.log(len(x)))

    def wider(powers: Tensor) -> Tensor:
        assert powers[0] == 1.0
        return -0.5 * powers[1] * x.square()

    share = {power: math.sqrt(2.0 * power - power**2) for power in weights.POWERS}
    least = min(power for power, each in share.items() if each >= weights.LEAST)
    assert powers_of(heavy, equal, wider(torch.ones(2)), wider).tolist() == [1.0, least]


def test_a_power_multiplies_the_log_of_a_factor() -> None:
    factors = Factors(torch.eye(2).expand(3, 2, 2), torch.ones(3, 2), {})
    found = raised(factors, torch.tensor([1.0, 0.5, 0.0]))
    assert found.precision[:, 0, 0].tolist() == found.shift[:, 1].tolist() == [1.0, 0.5, 0.0]


# ---------------------------------------------------------------------------------------- the whole
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


@pytest.mark.slow
@pytest.mark.parametrize("widened", [True, False])
def test_a_client_without_events_alone_in_its_region(
    widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not widened:
        monkeypatch.setattr(weights, "HEAVY", math.inf)
    mean, sd = last_region()
    found = fit(hierfl.methods.two_stage(by_region), people(), seed=3)
    found_region = found.draws(4000).shared["region"].view(4000, 3)[:, 2]
    ratio = float(found_region.std()) / sd
    if widened:
        assert found.history["widened"].max() == 1.0
        assert len(found.history) == 6 and found.history["k_hat"].iloc[-1] < 0.7
        assert abs(float(found_region.mean()) - mean) < 0.05 * sd and 0.9 < ratio < 1.1
    else:  # what the wider draws fix
        assert found.history["widened"].max() == 0.0 and ratio < 0.82
