"""Pictures of runs, posteriors and predictions: each function draws on Matplotlib's Axes and returns them."""

from hierfl.diagnostics.calibration import equal_mass
from hierfl.plots.clients import client_forest, client_map, prior_and_clients, shrinkage
from hierfl.plots.posteriors import forest
from hierfl.plots.predictions import coverage, entropies, rates, reliability
from hierfl.plots.ranks import rank_ecdf, rank_histogram
from hierfl.plots.runs import convergence
from hierfl.plots.style import COLOURS, MARKERS

__all__ = [
    "COLOURS",
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
