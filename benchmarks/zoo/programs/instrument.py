"""Wages and schooling with correlated errors, and a quarter of birth as instrument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, chapter 14"
IDIOM = "two outcomes stacked in the program, LKJ, no local site"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(34)
    hidden, quarter = rng.standard_normal(200), rng.integers(1, 5, 200).astype(float)
    school = rng.standard_normal(200) + hidden + quarter
    wage = rng.standard_normal(200) + hidden
    columns = {"wage": wage, "school": school, "quarter": quarter}
    scaled = {name: (v - v.mean()) / v.std() for name, v in columns.items()}
    return {"client": np.repeat(np.arange(8), 25), **scaled}


def model(batch: Any) -> None:
    """An effect of schooling on wages, by an instrument."""
    intercepts = pyro.sample("intercepts", dist.Normal(torch.zeros(2), 0.2).to_event(1))
    effect = pyro.sample("effect", dist.Normal(0.0, 0.5))
    by_quarter = pyro.sample("by_quarter", dist.Normal(0.0, 0.5))
    sigma = pyro.sample("sigma", dist.Exponential(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 2.0))
    with batch.clients(), batch.data():
        wage = intercepts[..., 0] + effect * batch.school
        school = intercepts[..., 1] + by_quarter * batch.quarter
        both = torch.stack([batch.wage, batch.school], -1)
        errors = dist.MultivariateNormal(
            torch.stack([wage, school], -1), scale_tril=sigma[..., None] * corr
        )
        pyro.sample("both", errors, obs=both)
