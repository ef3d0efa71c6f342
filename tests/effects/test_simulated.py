"""A fit of simulated clients recovers what they were simulated from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl

CLIENTS, ROWS, BETWEEN, WITHIN, SLOPE = 40, 25, 1.0, 1.5, 0.8


@pytest.mark.slow
def test_icc_r2_ranks_and_a_new_client() -> None:
    torch.set_default_dtype(torch.float32)
    rng = np.random.default_rng(0)
    own = rng.normal(0.0, BETWEEN, CLIENTS)
    own = BETWEEN * (own - own.mean()) / own.std()
    x = rng.standard_normal((CLIENTS, ROWS))
    y = 2.0 + SLOPE * x + own[:, None] + rng.normal(0.0, WITHIN, x.shape)
    names = [f"c{k:02d}" for k in range(CLIENTS)]
    rows = pd.DataFrame({"site": np.repeat(names, ROWS), "x": x.ravel(), "y": y.ravel()})
    fit = hierfl.fit(hierfl.formula("y ~ x + (1 | site)", clients="site"), rows)

    wanted = BETWEEN**2 / (BETWEEN**2 + WITHIN**2)
    icc = fit.icc().frame.loc["site"]
    assert icc["low"] < wanted < icc["high"] and icc["high"] - icc["low"] < 0.2
    explained = fit.r2().frame
    total = BETWEEN**2 + WITHIN**2 + SLOPE**2
    np.testing.assert_allclose(explained["mean"]["marginal"], SLOPE**2 / total, atol=0.04)
    np.testing.assert_allclose(explained["mean"]["conditional"], 1 - WITHIN**2 / total, atol=0.05)
    # 90% of the true effects, and of the true ranks, lie in their intervals
    profile = fit.profile().frame
    inside = (profile["effect_low"] <= own) & (own <= profile["effect_high"])
    assert inside.mean() >= 0.8
    ranks = own.argsort().argsort() + 1
    assert ((profile["rank_low"] <= ranks) & (ranks <= profile["rank_high"])).mean() >= 0.8
    # a new client's mean has the spread between clients
    new = fit.effects("x", client="new", grid=[0.0]).frame.iloc[0]
    np.testing.assert_allclose(new["sd"], BETWEEN, rtol=0.2)
    known = fit.effects("x", client="c00", grid=[0.0]).frame.iloc[0]
    np.testing.assert_allclose(known["sd"], WITHIN / np.sqrt(ROWS), rtol=0.15)
