"""Is the posterior to be trusted, and are its predictions? A function each, of a fit or of what it predicts."""

from hierfl.diagnostics.against_nuts import AgainstNuts, against_nuts
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.diagnostics.loo import Loo, compare, loo
from hierfl.diagnostics.psis import Corrected, corrected

__all__ = ["AgainstNuts", "Convergence", "Corrected", "Loo", "against_nuts", "compare", "convergence", "corrected", "loo"]
