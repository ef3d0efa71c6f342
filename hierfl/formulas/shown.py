"""A formula as people read and change it: in brms's form, its priors as a table, and with other terms."""

from dataclasses import replace
from typing import Any

import pandas as pd
from torch.distributions import Distribution

from hierfl.core.arguments import shown
from hierfl.formulas.expressions import BARS, DOT, Expression, summands, within
from hierfl.formulas.grammar import Reader, check, pointing
from hierfl.models.families import as_source


def text_of(formula: Any) -> str:
    """Return a formula in brms's form, a line for each part."""
    lines = {
        "Formula": "\n         ".join(formula.declared.parts.texts),
        "Family": f"{formula.family.name}, link {formula.family.link}",
        "Clients": formula.clients,
    }
    if formula.missing == "drop":
        lines["Missing"] = "rows are dropped"
    if formula.priors:
        priors = (f"{name} ~ {_prior(prior)}" for name, prior in formula.priors.items())
        lines["Priors"] = ", ".join(priors)
    lines["Schema"] = "not agreed on yet: hierfl.fit does it, or formula.on(frames)"
    if formula.has_schema:
        lines["Schema"] = f"agreed on by clients of {formula.agreed.rows:,} rows"
    return "\n".join(f"{name:>7}: {value}" for name, value in lines.items())


def _prior(prior: Any) -> str:
    if isinstance(prior, Distribution):
        return as_source(prior).replace("dist.", "")  # type: ignore[arg-type]  # Pyro's, as checked
    return str(prior)


def prior_table(formula: Any) -> pd.DataFrame:
    """Return a row for each prior of a formula with a schema."""
    rows = []
    for site, of in formula.site_priors.items():
        text = f"LKJ({of.prior:g})" if of.kind == "cor" else _prior(of.prior)
        rows.append((site, text, "user" if of.is_own else "default"))
    return pd.DataFrame(rows, columns=["site", "prior", "source"])


# ------------------------------------------------------------ other terms
def updated(old: str, new: str) -> str:
    """Return the text of formulas whose response has other terms: a dot is what stands on its side.

    The formulas of parameters stay.

    >>> updated("y ~ age + (1 | h); sigma ~ x", "~ . + sex - (1 | h)")
    'y ~ age + sex; sigma ~ x'
    """
    if not isinstance(new, str):
        raise TypeError(f"the update is {shown(new)}: write a text, '~ . + age'")
    with pointing(new):
        change, *several = Reader(new, "update").formulas()
    if several:
        raise ValueError(f"the update '{new}' has several formulas: declare them by hierfl.formula")
    first, *others = Reader(old).formulas()
    assert first.target is not None
    response = first.target if change.target is None else _filled(change.target, first.target)
    terms = list[tuple[str, Expression]]()
    with pointing(new):
        for sign, term in summands(change.right):
            if (sign, term) == ("+", DOT):
                terms += summands(first.right)
                continue
            what = "the update has a dot inside a term: write it as a term of its own"
            check(DOT not in within(term), term, what)
            is_there = ("+", term) in terms
            what = f"the formula '{old}' has no term '{term}' to remove: leave it out"
            check(sign == "+" or is_there or term.sign not in BARS, term, what)
            if sign == "-" and is_there:
                terms.remove(("+", term))
            elif (sign, term) not in terms:
                terms.append((sign, term))
    written = " ".join(f"{sign} {term}" for sign, term in terms).removeprefix("+ ") or "1"
    return "; ".join([f"{response} ~ {written}", *(sides.text for sides in others)])


def _filled(expression: Expression, dot: Expression) -> Expression:
    """Return an expression with another in place of its dots."""
    if expression == DOT:
        return dot
    return replace(expression, args=tuple(_filled(arg, dot) for arg in expression.args))
