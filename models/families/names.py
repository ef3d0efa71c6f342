"""`named`: the response family of a name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from hierfl.models.families.amounts import beta, gamma, gaussian, student
from hierfl.models.families.angles import von_mises
from hierfl.models.families.counts import (
    negative_binomial,
    poisson,
    zero_inflated_negative_binomial,
    zero_inflated_poisson,
)
from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.hurdles import (
    hurdle_gamma,
    hurdle_lognormal,
    hurdle_negative_binomial,
    hurdle_poisson,
)
from hierfl.models.families.levels import categorical, cumulative
from hierfl.models.families.ordered_beta import ordered_beta
from hierfl.models.families.parts import dirichlet, multinomial
from hierfl.models.families.skew import skew_normal
from hierfl.models.families.steps import acat, sratio
from hierfl.models.families.successes import bernoulli, beta_binomial, binomial
from hierfl.models.families.times import exponential, lognormal, weibull

FAMILIES: dict[str, Callable[[], ResponseFamily]] = {
    family.__name__: family
    for family in (
        *(bernoulli, beta, beta_binomial, binomial, categorical, cumulative, exponential, gamma),
        *(gaussian, lognormal, negative_binomial, poisson, student, weibull),
        *(hurdle_gamma, hurdle_lognormal, hurdle_negative_binomial, hurdle_poisson),
        *(acat, dirichlet, multinomial, ordered_beta, skew_normal, sratio, von_mises),
        *(zero_inflated_negative_binomial, zero_inflated_poisson),
    )
}
ALIASES = {
    "adjacent_category": "acat",
    "betabinomial": "beta_binomial",
    "binary": "bernoulli",
    "continuation_ratio": "sratio",
    "count": "poisson",
    "cratio": "sratio",  # the same family with a symmetric link
    "hurdle_negbinomial": "hurdle_negative_binomial",
    "linear": "gaussian",
    "log_normal": "lognormal",
    "logistic": "bernoulli",
    "negbin": "negative_binomial",
    "negbinomial": "negative_binomial",
    "negativebinomial": "negative_binomial",
    "normal": "gaussian",
    "ordbeta": "ordered_beta",
    "ordered": "cumulative",
    "ordinal": "cumulative",
    "proportional_odds": "cumulative",
    "sequential": "sratio",
    "softmax": "categorical",
    "student_t": "student",
    "t": "student",
    "vonmises": "von_mises",
    "zero_inflated_negbinomial": "zero_inflated_negative_binomial",
    "zinb": "zero_inflated_negative_binomial",
    "zip": "zero_inflated_poisson",
}


def named(name: str) -> ResponseFamily:
    """Return the response family of a name, with its default link.

    Args:
        name: such as "poisson", or another word for it, such as "normal" for "gaussian".

    Raises:
        ValueError: no family has the name; the message has the nearest ones.

    >>> named("normal").name
    'gaussian'
    """
    word = name.strip().lower().replace("-", "_").replace(" ", "_")
    word = ALIASES.get(word, word)
    if word in ("piecewise_exponential", "piecewise"):
        example = "families.piecewise_exponential(breaks=(1.0, 2.0))"
        raise ValueError(f"family {name!r} needs its breaks: use {example}, in the response's unit")
    base, _, link = word.rstrip(")").partition("(")
    if link and ALIASES.get(base, base) in FAMILIES:
        call = f"hierfl.models.families.{ALIASES.get(base, base)}(link='{link}')"
        raise ValueError(f"family is {name!r}: a link is an argument, {call}")
    if word not in FAMILIES:
        near = get_close_matches(word, [*FAMILIES, *ALIASES], n=3, cutoff=0.6)
        families = dict.fromkeys(ALIASES.get(match, match) for match in near) or sorted(FAMILIES)
        words = " or ".join(map(repr, families))
        raise ValueError(f"family is {name!r}, which hierfl does not have: use {words}")
    return FAMILIES[word]()
