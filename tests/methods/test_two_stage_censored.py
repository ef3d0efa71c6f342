"""Pairs of censored times, whose likelihoods are flat on one side: rounds of whole steps went in a cycle."""

import os

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import hierfl
from benchmarks.hard_problems import eyes
from hierfl import ClientBatch, ClientData
from hierfl.core.gaussians import Factor
from hierfl.summaries.factor import LEAST_SHARE, WHOLE, damped
from tests.sampled import sampled

PAIRS, OWN_SD = 40, 0.8
LOC, LOG_SHAPE = dist.Normal(0.0, 3.0), dist.Normal(0.0, 1.0)


def log_density(family: str, y: Tensor, event: Tensor, loc: Tensor, log_shape: Tensor) -> Tensor:
    """Return log densities of log times y, or of times beyond them."""
    z = (y - loc) * log_shape.exp()
    if family == "weibull":
        return event * (log_shape + z) - z.exp()
    beyond = (0.5 * torch.erfc(z / 2.0**0.5)).clamp(min=1e-30).log()
    return torch.where(event > 0.0, log_shape - 0.5 * z.square(), beyond)


def pairs(family: str) -> ClientData:
    """Return pairs of log times, two of three censored."""
    g = torch.Generator().manual_seed(1)
    own = OWN_SD * torch.randn(PAIRS, 1, generator=g)
    noise = torch.randn(PAIRS, 2, generator=g)
    if family == "weibull":
        noise = (-torch.rand(PAIRS, 2, generator=g).log()).log()
    time, end = 1.0 + own + noise, torch.rand(PAIRS, 2, generator=g)
    names = [f"c{k:02d}" for k in range(PAIRS) for _ in range(2)]
    event = (time < end).float().flatten()
    return ClientData.from_arrays(names, y=time.minimum(end).flatten(), event=event)


def grid(family: str, data: ClientData) -> dict[str, tuple[float, float]]:
    """Return means and sds by quadrature over a client's own scalar, on a grid of the global ones."""
    x, w = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(41))
    loc, log_shape = torch.linspace(-2.0, 8.0, 121).double(), torch.linspace(-2.5, 2.0, 91).double()
    y, event = (data.fields[n].double().view(PAIRS, 2) for n in ("y", "event"))
    log_p = LOC.log_prob(loc)[:, None] + LOG_SHAPE.log_prob(log_shape)
    at = loc[:, None, None, None] + OWN_SD * x[:, None], log_shape[:, None, None]
    for k in range(PAIRS):
        log_p = log_p + (log_density(family, y[k], event[k], *at).sum(-1).exp() @ w).log()
    p = log_p.flatten().softmax(0).view(len(loc), -1)
    moments = {}
    for name, values, of in (("loc", loc, p.sum(1)), ("log_shape", log_shape, p.sum(0))):
        mean = float(of @ values)
        moments[name] = mean, float((of @ (values - mean).square()).sqrt())
    return moments


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled(["weibull", "lognormal"], 2))
def test_censored_pairs_are_right_in_few_rounds(family: str) -> None:
    def model(batch: ClientBatch) -> None:
        loc, log_shape = pyro.sample("loc", LOC), pyro.sample("log_shape", LOG_SHAPE)
        with batch.clients():
            own = pyro.sample("own", dist.Normal(0.0, OWN_SD))
            with batch.data():
                log_p = log_density(family, batch.y, batch.event, loc + own, log_shape)
                pyro.factor("time", log_p)

    data = pairs(family)
    fit = hierfl.fit(model, data, seed=0, progress=False)
    assert len(fit.history) < 25 and "ended" not in fit.history
    draws = fit.draws(4000).shared
    for name, (mean, sd) in grid(family, data).items():
        assert abs(float(draws[name].mean()) - mean) < 0.1 * sd, name
        assert abs(float(draws[name].std()) / sd - 1.0) < 0.1, name


@pytest.mark.slow
@pytest.mark.skipif("HIERFL_DATA" not in os.environ, reason="data that do not ship")
def test_pairs_of_eyes_end_by_chains() -> None:
    """The slopes of censored rows add up to a shape of 58, where no factor is finite."""
    fit = hierfl.fit(*eyes("weibull", 197), seed=0, progress=False)
    assert len(fit.history) < 20 and "Trustworthy" in str(fit.summary())


def test_factors_are_damped_where_they_go_on() -> None:
    """Factors that answer each other by -1.1 times their distance from the right one arrive."""
    now, share = torch.tensor([[4.0]]), []
    for turn in range(40):
        before = Factor(now[..., None], now, torch.zeros(1))
        answer = Factor(-1.1 * now[..., None], -1.1 * now, torch.zeros(1))
        new = damped(answer, before, torch.tensor([float(turn)]))
        share.append(float((new.shift - now) / (answer.shift - now)))
        now = new.shift
    assert share[: int(WHOLE) + 1] == pytest.approx([1.0] * (int(WHOLE) + 1))
    assert share[-1] == pytest.approx(LEAST_SHARE) and abs(float(now)) < 1e-3


def test_nothing_is_kept_of_factors_that_overflowed() -> None:
    """A shift without curvature, as of rows at e^700, would stay in each later factor."""
    belief = torch.tensor([1.0]), torch.tensor([[0.5]])
    now = Factor(torch.tensor([[[2.0]], [[2.0]]]), torch.tensor([[3.0], [3.0]]), torch.zeros(2))
    before = Factor(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[1e18], [5.0]]), torch.zeros(2))
    new = damped(now, before, torch.full((2,), 40.0), belief)
    assert new.shift.tolist() == [[3.0], pytest.approx([3.0 * LEAST_SHARE + 5 * (1 - LEAST_SHARE)])]
    assert new.precision.flatten().tolist() == [2.0, 2.0]
