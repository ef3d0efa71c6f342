"""Pictures of posteriors and predictions: each function draws on Matplotlib's Axes and returns them."""

from hierfl.plots.posteriors import forest
from hierfl.plots.predictions import equal_mass, reliability
from hierfl.plots.style import COLOURS, MARKERS

__all__ = ["COLOURS", "MARKERS", "equal_mass", "forest", "reliability"]
