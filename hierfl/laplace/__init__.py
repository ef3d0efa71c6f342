"""Modes, curvatures and integrals of a client's log joint, by Newton's method and the Laplace approximation."""
