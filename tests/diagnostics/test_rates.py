"""Predictive intervals of event rates cover; those of a point estimate do not."""

from __future__ import annotations

import torch

import hierfl
from hierfl import guides
from hierfl.data.clients import ClientData
from hierfl.diagnostics import client_rates, coverage_p_value
from hierfl.methods import fedsvi
from tests.programs import fit, logistic

CLIENTS, TRAIN, TEST = 120, 12, 40


def drawn_from_the_model() -> ClientData:
    """Return clients whose slopes and labels are draws of `logistic`."""
    g = torch.Generator().manual_seed(3)
    each = TRAIN + TEST
    slope = torch.tensor([-0.5, 0.8]) + 0.7 * torch.randn(CLIENTS, 2, generator=g)
    x = torch.stack([torch.ones(CLIENTS, each), torch.randn(CLIENTS, each, generator=g)], -1)
    p = torch.sigmoid((x * slope[:, None]).sum(-1))
    ill = (torch.rand(p.shape, generator=g) < p).to(p.dtype)
    return ClientData.from_arrays(
        torch.arange(CLIENTS).repeat_interleave(each), x=x.reshape(-1, 2), ill=ill.reshape(-1)
    )


def test_intervals_of_held_out_rates_cover_and_those_of_a_point_do_not() -> None:
    """120 intervals: a true coverage of 0.78 in place of 0.9 would be found nine times in ten."""
    train, test = drawn_from_the_model().split(TRAIN / (TRAIN + TEST), seed=0)
    covered = {}
    for name, guide in (("spread", guides.conditional(newton_steps=2)), ("point", guides.delta)):
        pace = hierfl.optimizers.Adam(0.1)
        method = fedsvi(logistic, guide, optimizer=pace, local_optimizer=pace)
        fitted = fit(method, train, rounds=25, seed=0)
        # only the labels of the prediction are used, so one draw is enough
        prediction = fitted.predict(test, draws=1)
        table = client_rates(prediction, fitted.replicate(test, draws=100))
        assert len(table) == CLIENTS
        covered[name] = table["covered"]
    assert coverage_p_value(covered["spread"], 0.9) > 0.01, covered["spread"].mean()
    assert covered["spread"].mean() < 0.97  # intervals do not cover merely by being wide
    assert coverage_p_value(covered["point"], 0.9) < 1e-4, covered["point"].mean()
