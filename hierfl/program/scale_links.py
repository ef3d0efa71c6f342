"""Link functions: a positive number is learned as a function of a real one."""

from __future__ import annotations

from typing import Literal

import pyro.distributions as dist
from torch.distributions.constraints import Constraint

ScaleLink = Literal["softplus", "exp"]

_LINKS: dict[str, Constraint] = {
    "softplus": dist.constraints.softplus_positive,
    "exp": dist.constraints.positive,
}


def scale_constraint(link: ScaleLink) -> Constraint:
    """Return the constraint of a scale that is learned as softplus(r) = log(1 + e^r) or as exp(r).

    Above 0.1 a long step in r makes exp(r) explode, while softplus(r) moves as r does.

    >>> scale_constraint("exp")
    GreaterThan(lower_bound=0.0)
    """
    if link not in _LINKS:
        raise ValueError(f"scale_link is {link!r}; it must be {' or '.join(map(repr, _LINKS))}")
    return _LINKS[link]
