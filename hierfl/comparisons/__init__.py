"""Comparisons of methods that a study file declares: `hierfl compare`, `table` and `plot`."""
