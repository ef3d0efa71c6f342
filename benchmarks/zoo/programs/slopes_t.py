"""Eight slopes with a horseshoe prior, and a shift of each of twelve clients with a Student t's tails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyro.distributions as dist

from benchmarks.zoo.programs import slopes

SOURCE = "NumPyro, horseshoe regression, with an intercept of each group"
IDIOM = "a horseshoe of global slopes beside a local Student t"
LOGS = slopes.LOGS
rows = slopes.rows
SHIFTS = partial(dist.StudentT, 4.0)


def model(batch: Any) -> None:
    """Shifts have four degrees of freedom."""
    slopes.observe(batch, slopes.centered(), SHIFTS)


def for_numpyro(batch: Any) -> None:
    """The same: NUTS draws slopes as standard Normal ones."""
    slopes.observe(batch, slopes.non_centered(), SHIFTS)
