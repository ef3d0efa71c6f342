"""A Pyro model and guide as pure functions of named tensors: reading, checking, running."""
