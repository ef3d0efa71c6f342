"""Eight slopes with a horseshoe prior, and a shift of each of twelve clients with a Student t's tails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.programs import slopes

SOURCE = "NumPyro, horseshoe regression, with an intercept of each group"
IDIOM = "a horseshoe of global slopes beside a local Student t"
LOGS = slopes.LOGS
rows = slopes.rows


def model(batch: Any) -> None:
    """Shifts have four degrees of freedom."""
    tau, own = slopes.scales()
    slope = pyro.sample("slope", dist.Normal(0.0, tau * own).to_event(1))
    slopes.observe(batch, slope, partial(dist.StudentT, 4.0))


def for_numpyro(batch: Any) -> None:
    """The same: NUTS draws slopes as standard Normal ones."""
    tau, own = slopes.scales()
    raw = pyro.sample("raw", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    slopes.observe(batch, pyro.deterministic("slope", tau * own * raw), partial(dist.StudentT, 4.0))
