"""Pyro's automatic guides, as families of hierfl, whose params clients can hold apart."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hierfl.core.arguments import keywords

FAMILIES = {
    "AutoDelta": "delta",
    "AutoNormal": "mean_field",
    "AutoDiagonalNormal": "mean_field",
    "AutoMultivariateNormal": "structured",
    "AutoLowRankMultivariateNormal": "low_rank",
}
OPTIONS = {"_init_scale": "init_scale", "rank": "rank"}  # attribute of Pyro's guide -> our option


def family_of(guide: Any) -> Any:
    """Return the family that stands for an automatic guide of Pyro's; other guides as they are."""
    kind = guide if isinstance(guide, type) else type(guide)
    if not kind.__module__.startswith("pyro.infer.autoguide") or kind.__name__ not in FAMILIES:
        return guide
    family = getattr(import_module("hierfl.guides"), FAMILIES[kind.__name__])
    names, options = keywords(family.build) or (), {}
    for attribute, name in OPTIONS.items():
        value = None if kind is guide else getattr(guide, attribute, None)
        if value is not None and name in names:
            options[name] = value
    return family(**options) if options else family
