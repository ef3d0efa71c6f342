"""Grades of heart biopsies, which are read lower than they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "BUGS volume II, Biopsies"
IDIOM = "row labels, a factor alone depends on them"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(85)
    table = [[1, 0, 0, 0], [0.4, 0.6, 0, 0], [0.3, 0.2, 0.5, 0], [0.1, 0.1, 0.2, 0.6]]
    grade = rng.choice(4, 80, p=[0.2, 0.3, 0.3, 0.2])
    y = np.stack([rng.multinomial(rng.integers(2, 4), table[k]) for k in grade])
    return {"client": np.arange(80) % 4, "y": y.astype(float)}


def model(batch: Any) -> None:
    """A triangular table of errors, row by row."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    second = pyro.sample("second", dist.Dirichlet(torch.ones(2)))
    third = pyro.sample("third", dist.Dirichlet(torch.ones(3)))
    fourth = pyro.sample("fourth", dist.Dirichlet(torch.ones(4)))
    none, first = torch.zeros(2), torch.tensor([1.0, 0.0, 0.0, 0.0])
    rows = [first, torch.cat([second, none]), torch.cat([third, none[:1]]), fourth]
    table = torch.stack(rows)
    with batch.clients(), batch.data():
        grade = pyro.sample("grade", dist.Categorical(p), infer={"enumerate": "parallel"})
        pyro.factor("y", (batch.y * torch.log(table[grade] + 1e-30)).sum(-1))
