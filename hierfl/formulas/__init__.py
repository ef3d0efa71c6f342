"""Formulas: mixed models as text, the schema that clients agree on, and the Pyro program."""

from hierfl.formulas.columns import Column
from hierfl.formulas.schema import Grouping, Margin, Schema
from hierfl.formulas.transforms import Constants

__all__ = ["Column", "Constants", "Grouping", "Margin", "Schema"]
