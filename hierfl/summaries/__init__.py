"""A client's summary: a Gaussian factor of its likelihood, and the hierarchy above the factors."""
