"""Exponential times: a constant hazard."""

from __future__ import annotations

from hierfl.models.families.censored import censored
from hierfl.models.families.family import ResponseFamily, no_parameters
from hierfl.models.families.links import log_scale
from hierfl.program.recipes import recorded


@recorded
def exponential() -> ResponseFamily:
    """Return the family of times with a constant hazard and mean exp(eta), log link.

        y ~ Exponential(rate exp(-eta))

    Times may be censored or entered late (`Censored`): the row fields "cens", "upper" and "entry".

    >>> exponential().expression()
    'dist.Exponential((-eta).exp())'
    """
    return ResponseFamily(
        name="exponential",
        link="log",
        kind="time",
        likelihood=censored("dist.Exponential((-eta).exp())"),
        parameters=no_parameters,
        scale=log_scale,
        additions=("cens", "upper", "entry"),
    )
