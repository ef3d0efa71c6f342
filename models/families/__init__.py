"""Response families of formulas: one file a likelihood, with its links and default priors."""

from hierfl.models.families.bernoulli import bernoulli
from hierfl.models.families.beta import beta
from hierfl.models.families.beta_binomial import BetaBinomial, beta_binomial
from hierfl.models.families.binomial import Binomial, binomial
from hierfl.models.families.categorical import categorical
from hierfl.models.families.censored import Censored
from hierfl.models.families.cumulative import cumulative, cumulative_logits
from hierfl.models.families.default_priors import half_student, intercept_prior, shape_prior
from hierfl.models.families.exponential import exponential
from hierfl.models.families.family import Response, ResponseFamily
from hierfl.models.families.gamma import gamma
from hierfl.models.families.gaussian import gaussian
from hierfl.models.families.links import cloglog_logits, probit_logits
from hierfl.models.families.lognormal import lognormal
from hierfl.models.families.names import named
from hierfl.models.families.negative_binomial import NegativeBinomial, negative_binomial
from hierfl.models.families.ordered import Ordered
from hierfl.models.families.piecewise_exponential import PiecewiseExponential, piecewise_exponential
from hierfl.models.families.poisson import poisson
from hierfl.models.families.source import as_source
from hierfl.models.families.student import student
from hierfl.models.families.weibull import Weibull, weibull
from hierfl.models.families.zero_inflated_poisson import zero_inflated_poisson

__all__ = [
    "BetaBinomial",
    "Binomial",
    "Censored",
    "NegativeBinomial",
    "Ordered",
    "PiecewiseExponential",
    "Response",
    "ResponseFamily",
    "Weibull",
    "as_source",
    "bernoulli",
    "beta",
    "beta_binomial",
    "binomial",
    "categorical",
    "cloglog_logits",
    "cumulative",
    "cumulative_logits",
    "exponential",
    "gamma",
    "gaussian",
    "half_student",
    "intercept_prior",
    "lognormal",
    "named",
    "negative_binomial",
    "piecewise_exponential",
    "poisson",
    "probit_logits",
    "shape_prior",
    "student",
    "weibull",
    "zero_inflated_poisson",
]
