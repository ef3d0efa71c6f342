"""`fit` and `load`: a run, its result, and both on disk."""
