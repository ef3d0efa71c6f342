"""The families of a family's parameters, and of covariates, that have terms of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hierfl.models.families import Response, ResponseFamily, gaussian


class PredictorLink(NamedTuple):
    """The link of a parameter's linear predictor, and the code that takes the predictor to the parameter."""

    name: str
    inverse: str


LOG, LOGIT = PredictorLink("log", ".exp()"), PredictorLink("logit", ".sigmoid()")
LINKS = {"sigma": LOG, "shape": LOG, "phi": LOG, "zi": LOGIT, "hu": LOGIT}
SOME = Response(1.0, 1.0, ("a", "b", "c"))  # of which every family has its parameters


def joined(texts: str | Sequence[str]) -> str:
    """Return the text of a formula, or of a list of them: of the response and of parameters."""
    if isinstance(texts, str):
        return texts
    if isinstance(texts, Mapping):
        formulas = [f"{name} {terms}" for name, terms in texts.items()]
        fix = f"write a list, {formulas!r}, that of the response first"
        raise TypeError(f"the formula is a dict: {fix}")
    listed = isinstance(texts, list | tuple) and len(texts) > 0
    if not listed or not all(isinstance(text, str) for text in texts):
        fix = "it must be a string, 'y ~ x', or a list of strings, ['y ~ x', 'sigma ~ x']"
        raise TypeError(f"the formula is {texts!r}: {fix}")
    return "; ".join(text.strip() for text in texts)


def family_of_parameter(name: str, family: ResponseFamily, response: str) -> ResponseFamily:
    """Return the family of a parameter with terms; refuse a name that cannot have some."""
    parameters = family.parameters(SOME)
    usable = [parameter for parameter in parameters if parameter in LINKS]
    if name not in usable:
        if response in usable:
            advice = (
                f"and the formula of the response comes first: put that of '{response}' after it"
            )
        elif not usable:
            advice = f"and no parameter of family '{family.name}' may have some: leave it out"
        else:
            advice = f"which family '{family.name}' cannot have: write '{usable[0]} ~ ...'"
        raise ValueError(f"'{name} ~ ...' gives terms to '{name}', {advice}")

    def scale(response: Response) -> tuple[float, float]:
        """Return the center and spread of the predictor, given the response."""
        spread = family.scale(response)[1] if name == "sigma" else 1.0
        return (float(f"{math.log(spread):.6g}") if spread > 0.0 else 0.0), 0.0

    return ResponseFamily(name, LINKS[name].name, "positive", "", lambda response: {}, scale)


def covariate_family(name: str, mean: float, sd: float) -> ResponseFamily:
    """Return the family of a covariate, of which the response knows nothing."""
    plain = gaussian()
    center, spread = float(f"{mean:.6g}"), float(f"{sd:.6g}")
    return replace(
        plain,
        name="gaussian",
        parameters=lambda response: {
            f"sigma_{name}": plain.parameters(replace(response, mean=center, sd=spread))["sigma"]
        },
        scale=lambda response: (center, spread),
    )
