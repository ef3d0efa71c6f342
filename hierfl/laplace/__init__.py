"""Modes, curvatures and integrals of a client's log joint: Newton's and Laplace's methods."""
