"""`named`: the response family of a name."""

from difflib import get_close_matches

from hierfl.models import families
from hierfl.models.families.family import ResponseFamily

FAMILIES = """
    acat bernoulli beta beta_binomial binomial categorical cumulative dirichlet exponential gamma
    gaussian hurdle_gamma hurdle_lognormal hurdle_negative_binomial hurdle_poisson lognormal
    multinomial negative_binomial ordered_beta poisson skew_normal sratio student von_mises weibull
    zero_inflated_negative_binomial zero_inflated_poisson
""".split()
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
ALIKE = 0.85  # of names, by difflib; "loglogistic" is not like "logistic"


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
    if word not in FAMILIES:
        near = get_close_matches(word, [*FAMILIES, *ALIASES], n=3, cutoff=ALIKE)
        nearest = dict.fromkeys(ALIASES.get(match, match) for match in near) or FAMILIES
        words = " or ".join(map(repr, nearest))
        raise ValueError(f"family is {name!r}, which hierfl does not have: use {words}")
    made: ResponseFamily = getattr(families, word)()
    return made
