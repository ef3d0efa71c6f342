"""Terms of a family's parameters: "y ~ x + (1 | h); sigma ~ x + (1 | h)"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hierfl.models.families import Response, ResponseFamily, gaussian

Scale = Callable[[Response], tuple[float, float]]
Declared = TypeVar("Declared")
# Parameter -> the link of its linear predictor, and what takes the predictor to the parameter.
LINKS = {
    "sigma": ("log", ".exp()"),
    "shape": ("log", ".exp()"),
    "phi": ("log", ".exp()"),
    "zi": ("logit", ".sigmoid()"),
    "hu": ("logit", ".sigmoid()"),
}
SOME = Response(1.0, 1.0, ("a", "b", "c"))  # of which every family has its parameters


def parts_of(text: str) -> list[str]:
    """Return the formulas of a text, which stand between semicolons, outside of back-quotes."""
    parts, quoted = [""], False
    for letter in text:
        quoted ^= letter == "`"
        if letter == ";" and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


# what is quoted; or the space before the parenthesis of a call
QUOTED_OR_SPACE = re.compile(r"""(`[^`]*`|"[^"]*"|'[^']*')|(?<=\w)\s+(?=\()""")


def joined(texts: str | Sequence[str]) -> str:
    """Return the text of a formula, or of a list of them: of the response and of parameters; calls as `f(x)`."""
    if isinstance(texts, str):
        return QUOTED_OR_SPACE.sub(lambda found: found[1] or "", texts)
    if isinstance(texts, Mapping):
        each = [f"{name} {terms}" for name, terms in texts.items()]
        raise TypeError(
            f"the formula is a dict: write a list, as in brms's bf() and bambi's Formula, {each!r}, that "
            "of the response first"
        )
    listed = isinstance(texts, list | tuple) and len(texts) > 0
    if not listed or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"the formula is {texts!r}: it must be a string, 'y ~ x', or a list of strings, "
            "['y ~ x', 'sigma ~ x']"
        )
    return joined("; ".join(text.strip() for text in texts))


def declarations_of(of: Declared) -> dict[str, Declared]:
    """Return the declaration of each parameter that has terms; refuse a parameter that cannot have some."""
    declared: Any = of  # a `Declaration`, whose module imports this one
    found: dict[str, Declared] = {}
    known = declared.family.parameters(SOME)
    parts = declared.parts
    response = f"`{parts.response}`" if len(parts.labels) == 1 else parts.response
    for text in parts_of(declared.text)[1:]:
        if "mi(" in declared.text:
            own: Any = of_covariate(declared, text)
            if own is not None:
                if own.parts.response in found:
                    raise ValueError(f"'{own.parts.response}' has two formulas: write one")
                found[own.parts.response] = own
                continue
        name, _, terms = (part.strip() for part in text.partition("~"))
        if not name or not terms:
            raise ValueError(
                f"'{text}' is no formula of a parameter: write 'sigma ~ x', or leave it out"
            )
        if name not in known or name not in LINKS:
            raise ValueError(
                f"'{text}' gives terms to '{name}', "
                + _instead(parts.response, known, declared.family.name)
            )
        if name in found:
            raise ValueError(f"'{name}' has two formulas: write one")
        family = ResponseFamily(
            name, LINKS[name][0], "positive", "", lambda response: {}, _scale(name, declared.family)
        )
        found[name] = replace(declared, text=f"{response} ~ {terms}", family=family)
    return found


def _instead(response: str, known: Collection[str], family: str) -> str:
    """Return why a name has no terms, and what to write."""
    usable = [one for one in known if one in LINKS]
    if response in usable:
        return f"and the formula of the response comes first: put that of '{response}' after it"
    if not usable:
        return f"and no parameter of family '{family}' may have some: leave it out"
    return f"which family '{family}' cannot have: write '{usable[0]} ~ ...'"


def _scale(name: str, family: ResponseFamily) -> Scale:
    """Return the center and spread of a parameter's predictor, given the response."""

    def of(response: Response) -> tuple[float, float]:
        spread = family.scale(response)[1] if name == "sigma" else 1.0
        return (float(f"{math.log(spread):.6g}") if spread > 0.0 else 0.0), 0.0

    return of


# ------------------------------------------------------------ covariates that rows may lack
SIDE = re.compile(r"(`[^`]+`|[\w.]+)\s*\|\s*mi\(\s*\)")


def covariates_of(text: str) -> tuple[str, ...]:
    """Return the covariates that have a formula of their own, "x | mi() ~ z"."""
    sides = (SIDE.fullmatch(part.partition("~")[0].strip()) for part in parts_of(text)[1:])
    return tuple(side[1].strip("`") for side in sides if side)


def of_covariate(declared: Any, text: str) -> Any:
    """Return the declaration of "x | mi() ~ z"; None of another formula."""
    left, _, terms = (part.strip() for part in text.partition("~"))
    side = SIDE.fullmatch(left)
    if side is None:
        column, bar, _ = (part.strip() for part in left.partition("|"))
        if f"mi({column})" in declared.text:
            more = "; a known error of measurement needs a Pyro program (docs/recipes.md)"
            raise ValueError(
                f"'{text}' imputes '{column}': write '{column} | mi() ~ {terms}'{more if bar else ''}"
            )
        return None
    return replace(
        declared, text=f"{side[1]} ~ {terms}", family=covariate_family(side[1].strip("`"), 0.0, 1.0)
    )


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
