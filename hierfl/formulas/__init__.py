"""Formulas: mixed models as one line of text, the schema that clients agree on, and the Pyro program they stand for."""

from hierfl.formulas.columns import Column
from hierfl.formulas.schema import Grouping, Margin, Schema
from hierfl.formulas.transforms import Constants

__all__ = ["Column", "Constants", "Grouping", "Margin", "Schema"]
