"""Plots of runs, posteriors and predictions.

Each function draws on the Matplotlib Axes that it is given, and returns them.
"""

from hierfl.diagnostics.calibration import equal_mass
from hierfl.plots.clients import client_forest, prior_and_clients, shrinkage
from hierfl.plots.maps import client_map
from hierfl.plots.posteriors import forest
from hierfl.plots.predictions import coverage, entropies, rates, reliability
from hierfl.plots.ranks import rank_ecdf, rank_histogram
from hierfl.plots.runs import convergence
from hierfl.plots.style import COLORS, MARKERS

__all__ = [
    "COLORS",
    "MARKERS",
    "client_forest",
    "client_map",
    "convergence",
    "coverage",
    "entropies",
    "equal_mass",
    "forest",
    "prior_and_clients",
    "rank_ecdf",
    "rank_histogram",
    "rates",
    "reliability",
    "shrinkage",
]
