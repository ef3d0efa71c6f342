"""A formula as people read and change it: in brms's form, its priors as a table, and with other terms."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
from torch.distributions import Distribution

from hierfl.core.arguments import shown
from hierfl.formulas.parameters import parts_of
from hierfl.formulas.parse import summands_of, tokens_of
from hierfl.formulas.priors import keys_of
from hierfl.formulas.syntax import text_of_tokens
from hierfl.models.families import as_source

DOT = re.compile(r"(?<![\w.])\.(?![\w.])")


def text_of(formula: Any) -> str:
    """Return a formula in brms's form, a line for each part."""
    lines = {
        "Formula": "\n         ".join(parts_of(formula.text)),
        "Family": f"{formula.family.name}, link {formula.family.link}",
        "Clients": formula.clients,
    }
    if formula.missing == "drop":
        lines["Missing"] = "rows are dropped"
    if formula.priors:
        lines["Priors"] = ", ".join(
            f"{name} ~ {_prior(prior)}" for name, prior in formula.priors.items()
        )
    if formula.has_schema:
        rows = formula.agreed.rows
        lines["Schema"] = f"agreed on by clients of {rows:,} rows"
    else:
        lines["Schema"] = "not agreed on yet: hierfl.fit does it, or formula.on(frames)"
    return "\n".join(f"{name:>7}: {value}" for name, value in lines.items())


def _prior(prior: Any) -> str:
    if isinstance(prior, Distribution):
        return as_source(prior).replace("dist.", "")  # type: ignore[arg-type]  # Pyro's, as checked
    return str(prior)


def prior_table(formula: Any) -> pd.DataFrame:
    """Return a row for each prior of a formula with a schema."""
    layouts = formula.layouts
    correlations = {term.cor for found in layouts for term in found.groups if term.cor}
    keys = {site: set(keys_of(site, formula.layout)) for site in formula.all_priors}
    if ";" in formula.text:
        for own in formula.parameters.values():
            for site in own.own(formula.all_priors):
                known = own.named(dict.fromkeys(keys_of(site, own.layout), 0.0))
                keys[next(iter(own.named({site: 0.0})))] = set(known) - {"b", "sd", "cor"}
    rows = []
    for site, prior in formula.all_priors.items():
        text = f"LKJ({prior:g})" if site in correlations else _prior(prior)
        given = any(key in formula.priors for key in keys[site])
        rows.append((site, text, "user" if given else "default"))
    return pd.DataFrame(rows, columns=["site", "prior", "source"])


# ------------------------------------------------------------ other terms
def updated_whole(old: str, new: str) -> str:
    """Return the text of a formula whose response has other terms; terms of parameters stay."""
    if not isinstance(new, str):
        raise TypeError(f"the update is {shown(new)}: write a text, '~ . + age'")
    if len(parts_of(new)) > 1:
        raise ValueError(f"the update '{new}' has several formulas: declare them by hierfl.formula")
    first, *others = parts_of(old)
    return "; ".join([updated_text(first, new), *others])


def updated_text(old: str, new: str) -> str:
    """Return a formula's text with other terms: a dot is what stands on its side of the old one.

    >>> updated_text("y ~ age + (1 | h)", "~ . + sex - (1 | h)")
    'y ~ age + sex'
    """
    stand_in = "all_of_it"
    while stand_in in old + new:
        stand_in += "_"
    (response, terms), (left, right) = _sides(old), _sides(_marked(new, stand_in))
    before = (text_of_tokens(left) or stand_in).replace(stand_in, text_of_tokens(response))
    parts: list[str] = []
    for sign, tokens in summands_of(right):
        term = text_of_tokens(tokens)
        if term == stand_in and sign == "+":
            parts += [f"{s} {text_of_tokens(t)}" for s, t in summands_of(terms)]
        elif stand_in in term:
            raise ValueError(
                f"the update '{new.strip()}' has a dot inside of a term: write it as a term of its own"
            )
        elif sign == "-" and f"+ {term}" in parts:
            parts.remove(f"+ {term}")
        elif sign == "-" and "|" in term:
            raise ValueError(f"the formula '{old}' has no term '{term}' to take away: leave it out")
        elif f"{sign} {term}" not in parts:
            parts.append(f"{sign} {term}")
    return f"{before} ~ {' '.join(parts).removeprefix('+ ') or '1'}"


def _sides(text: str) -> tuple[list[Any], list[Any]]:
    """Return the signs before and after the "~" of a formula."""
    tokens = tokens_of(text)
    at = [place for place, token in enumerate(tokens) if token.kind == "TILDE"]
    if len(at) != 1 or at[0] == len(tokens) - 1:
        raise ValueError(f"'{text}' has no terms after one sign '~': write '~ . + age'")
    return tokens[: at[0]], tokens[at[0] + 1 :]


def _marked(text: str, stand_in: str) -> str:
    """Return a text with another word for each dot outside of back-quotes."""
    parts = text.split("`")
    parts[::2] = [DOT.sub(stand_in, part) for part in parts[::2]]
    return "`".join(parts)
