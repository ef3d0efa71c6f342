"""Response families of formulas: one file a likelihood, with its links and default priors."""

from hierfl.models.families.bernoulli import bernoulli
from hierfl.models.families.default_priors import half_student, intercept_prior
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.gaussian import gaussian
from hierfl.models.families.links import cloglog_logits, probit_logits
from hierfl.models.families.names import named
from hierfl.models.families.ordered import Ordered
from hierfl.models.families.poisson import poisson
from hierfl.models.families.source import as_source

__all__ = [
    "Ordered",
    "Response",
    "ResponseFamily",
    "as_source",
    "bernoulli",
    "cloglog_logits",
    "gaussian",
    "half_student",
    "intercept_prior",
    "named",
    "poisson",
    "probit_logits",
]
