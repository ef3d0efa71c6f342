"""Comparisons of methods that a study file declares: `hierfl compare`, `table` and `plot`."""

from hierfl.core.extras import extras_for

with extras_for("a study file"):
    import pydantic as pydantic
