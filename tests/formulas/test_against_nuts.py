"""Families and terms on real rows against NUTS of NumPyro, on the printed program and densities of its own."""

import os

import numpy as np
import pytest

import hierfl
from benchmarks.formula_nuts import pooled_nuts
from benchmarks.formula_problems import OF_FAMILIES, OF_TERMS
from benchmarks.formulas import posterior
from benchmarks.pooled_nuts import has_numpyro

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_numpyro(), reason="NumPyro is not installed"),
    pytest.mark.skipif("HIERFL_DATA" not in os.environ, reason="HIERFL_DATA names no folder"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", [*OF_TERMS, *OF_FAMILIES])
def test_the_posterior_is_that_of_nuts(name: str) -> None:
    problem = {**OF_TERMS, **OF_FAMILIES}[name]
    frame = problem.frame()
    made = problem.model(frame)
    data = made.data(frame)
    mean, sd = posterior(hierfl.fit(made, data, seed=0, progress=False))
    nuts = pooled_nuts(made, data, few=True, apart=problem.apart)
    off, ratios = [], []
    for site in mean:
        spread = nuts[f"{site}/sd"]
        moving = spread > 1e-12
        off.append(np.ravel(abs(mean[site] - nuts[f"{site}/mean"])[moving] / spread[moving]))
        ratios.append(np.ravel(sd[site][moving] / spread[moving]))
    worst, ratio = np.concatenate(off).max(), np.concatenate(ratios)
    how = {n: float(nuts[n]) for n in ("r_hat", "effective", "diverging")}
    print(f"{name}: worst mean {worst:.3f} sd, sds {ratio.min():.2f}-{ratio.max():.2f}; NUTS {how}")
    assert how["effective"] >= 300 and how["diverging"] <= 0.005, "the chain is not a reference"
    assert worst < 0.15
    assert ratio.min() > 0.85 and ratio.max() < 1.15
