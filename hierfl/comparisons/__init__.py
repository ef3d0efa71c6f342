"""Comparisons of methods that a study file declares: `hierfl compare STUDY.toml`, `hierfl table`, `hierfl plot`."""
