"""Is the posterior to be trusted, and are its predictions? A function each, of a fit or of what it predicts."""

from hierfl.diagnostics.sbc import Sbc, ecdf_band, sbc
from hierfl.diagnostics.sbc_plot import rank_ecdf, rank_histogram

__all__ = [
    "Sbc",
    "ecdf_band",
    "rank_ecdf",
    "rank_histogram",
    "sbc",
]
