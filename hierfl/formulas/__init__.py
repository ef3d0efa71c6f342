"""Formulas: mixed models as one line of text, the schema that clients agree on, and the Pyro program they stand for."""
