"""Diagnostics of a posterior and of its predictions."""

from hierfl.diagnostics.against_nuts import AgainstNuts, against_nuts
from hierfl.diagnostics.audit import Audit, audit
from hierfl.diagnostics.calibration import (
    CalibrationError,
    calibration_error,
    client_rates,
    confidence,
    coverage_p_value,
    equal_mass,
    interval_coverage,
)
from hierfl.diagnostics.check import Check
from hierfl.diagnostics.client_scores import across_clients, client_scores, crps
from hierfl.diagnostics.coherence import Coherence, client_gradients, coherence, loss_deviations
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.diagnostics.generalization import Gap, effective_clients, generalization_gap
from hierfl.diagnostics.loo import Loo, compare, loo
from hierfl.diagnostics.nuts import Reference, nuts
from hierfl.diagnostics.ood import (
    OutOfDistribution,
    auroc,
    entropy_density,
    fpr95,
    mutual_information,
    out_of_distribution,
    predictive_entropy,
)
from hierfl.diagnostics.pac_bayes import PacBayes, pac_bayes
from hierfl.diagnostics.sbc import Sbc, ecdf_band, sbc
from hierfl.diagnostics.summary import Summary, summary
from hierfl.posterior.corrected import Corrected, corrected

__all__ = [
    "AgainstNuts",
    "Audit",
    "CalibrationError",
    "Check",
    "Coherence",
    "Convergence",
    "Corrected",
    "Gap",
    "Loo",
    "OutOfDistribution",
    "PacBayes",
    "Reference",
    "Sbc",
    "Summary",
    "across_clients",
    "against_nuts",
    "audit",
    "auroc",
    "calibration_error",
    "client_gradients",
    "client_rates",
    "client_scores",
    "coherence",
    "compare",
    "confidence",
    "convergence",
    "corrected",
    "coverage_p_value",
    "crps",
    "ecdf_band",
    "effective_clients",
    "entropy_density",
    "equal_mass",
    "fpr95",
    "generalization_gap",
    "interval_coverage",
    "loo",
    "loss_deviations",
    "mutual_information",
    "nuts",
    "out_of_distribution",
    "pac_bayes",
    "predictive_entropy",
    "sbc",
    "summary",
]
