"""Pictures of posteriors and predictions: each function draws on Matplotlib's Axes and returns them."""

from hierfl.diagnostics.calibration import equal_mass
from hierfl.plots.posteriors import forest
from hierfl.plots.predictions import reliability
from hierfl.plots.style import COLOURS, MARKERS

__all__ = ["COLOURS", "MARKERS", "equal_mass", "forest", "reliability"]
