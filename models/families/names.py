"""`named`: the response family of a name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from hierfl.models.families.bernoulli import bernoulli
from hierfl.models.families.family import ResponseFamily
from hierfl.models.families.gaussian import gaussian
from hierfl.models.families.poisson import poisson

FAMILIES: dict[str, Callable[[], ResponseFamily]] = {
    "bernoulli": bernoulli,
    "gaussian": gaussian,
    "poisson": poisson,
}
ALIASES = {
    "binary": "bernoulli",
    "linear": "gaussian",
    "logistic": "bernoulli",
    "normal": "gaussian",
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
    if word in FAMILIES:
        return FAMILIES[word]()
    near = get_close_matches(word, [*FAMILIES, *ALIASES], n=3, cutoff=0.6)
    found = list(dict.fromkeys(ALIASES.get(one, one) for one in near)) or sorted(FAMILIES)
    words = " or ".join(repr(one) for one in found)
    raise ValueError(f"family is {name!r}, which hierfl does not have: use {words}")
