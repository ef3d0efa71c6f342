"""Children choose a box: the majority's, a minority's, the untried one, or what they saw first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

SOURCE = "Statistical Rethinking, Boxes model"
IDIOM = "constants of its own type, einsum"


def rows() -> dict[str, Any]:
    """Return the rows."""
    rng = np.random.default_rng(69)
    seen_first = np.tile([0, 1], 160)
    kind = rng.choice(4, 320, p=[0.4, 0.2, 0.2, 0.2])
    first = np.where(seen_first == 1, 0, 2)
    y = np.select([kind == 0, kind == 1, kind == 2], [1, 2, rng.integers(0, 3, 320)], first)
    return {"client": np.repeat(np.arange(8), 40), "seen_first": seen_first, "y": y}


def model(batch: Any) -> None:
    """Probabilities of four strategies, each of which fixes a table of choices."""
    p = pyro.sample("p", dist.Dirichlet(torch.tensor([4.0, 4.0, 4.0, 4.0])))
    majority, minority = [[0.01, 0.98, 0.01]] * 2, [[0.01, 0.01, 0.98]] * 2
    chance, first = [[0.34, 0.33, 0.33]] * 2, [[0.01, 0.01, 0.98], [0.98, 0.01, 0.01]]
    tables = torch.tensor([majority, minority, chance, first])
    with batch.clients(), batch.data():
        probs = torch.einsum("k,kmj->mj", p, tables)[batch.seen_first]
        pyro.sample("y", dist.Categorical(probs=probs), obs=batch.y)
