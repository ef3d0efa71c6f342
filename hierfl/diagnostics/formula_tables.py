"""The posterior of a formula as tables in brms's order."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import INTERCEPT, GroupTerm

# Column of the summary's frame -> as brms calls it.
NAMES = {"mean": "estimate", "sd": "est. error", "low": "5 %", "high": "95 %"}
Tables = tuple[tuple[str, pd.DataFrame], ...]


def titled(formula: Formula) -> str:
    """Return the formula and its family, the first line of the summary."""
    family = formula.family
    return f"{formula.text}, {family.name} with link {family.link}"


def formula_tables(formula: Formula, frame: pd.DataFrame, clients: Sequence[str]) -> Tables:
    """Return the tables of a summary's frame, each with its heading, without empty ones."""
    layout = formula.layout
    common = [INTERCEPT, *(term.name for term in layout.common.terms)]
    heading = "Population level"
    if layout.has_intercept and layout.is_centered and layout.common.columns:
        heading += f" ({INTERCEPT}: where all predictors are at their means)"
    tables = [(heading, _table(frame, common))]
    for term in layout.groups:
        tables.append(
            (f"Group level, {_groups(formula, term, len(clients))}", _spread(frame, term))
        )
    others = {*common, *(name for term in layout.groups for name in _sites_of(term))}
    left = [name for name in dict.fromkeys(frame["site"]) if name not in others]
    tables.append((f"Family, {formula.family.name}", _table(frame, left)))
    for term in layout.groups:
        own = term.place in ("clients", "within")
        what = "own coefficients" if term.place == "clients" else "deviations"
        of = f"{term.group.name}: {what}{' by client' if own else ''}"
        tables.append((of, _table(frame, [term.site], shrinkage=own)))
    return tuple((heading, table) for heading, table in tables if len(table))


def _sites_of(term: GroupTerm) -> tuple[str, ...]:
    return (term.site, term.sd, term.cor or "", term.cholesky)


def _groups(formula: Formula, term: GroupTerm, clients: int) -> str:
    """Return the name and the number of a term's groups."""
    if term.place == "clients":
        return f"{term.site} ({clients} groups)"
    if term.place == "within":
        return f"{term.site} (at most {term.size} groups in one {formula.clients})"
    return f"{term.site} ({term.size} groups)"


def _table(frame: pd.DataFrame, sites: Sequence[str], *, shrinkage: bool = False) -> pd.DataFrame:
    """Return the rows of some sites, named as brms names them: `age`, `sex[male]`."""
    some = frame[frame["site"].isin(sites)]
    some = some.sort_values("site", key=lambda s: s.map(list(sites).index), kind="stable")
    found = some[[*NAMES, "shrinkage"] if shrinkage else [*NAMES]].rename(columns=NAMES)
    single = len(sites) == 1 and bool((some["client"] != "").any())
    if single:
        found.insert(0, "client", some["client"])
        if (some["entry"] != "").any():
            found.insert(1, "term", some["entry"])
        return found.reset_index(drop=True)
    found.index = pd.Index(
        [f"{s}[{e}]" if e else s for s, e in zip(some["site"], some["entry"], strict=True)]
    )
    return found


def _spread(frame: pd.DataFrame, term: GroupTerm) -> pd.DataFrame:
    """Return the standard deviations of a term, and each correlation once."""
    sds = frame[frame["site"] == term.sd]
    names = [entry or INTERCEPT for entry in sds["entry"]]
    parts = [sds.assign(name=[f"sd({name})" for name in names])]
    if term.cor:
        both = frame[frame["site"] == term.cor]
        pairs = {f"{a}, {b}": f"cor({a}, {b})" for i, a in enumerate(names) for b in names[i + 1 :]}
        once = both[both["entry"].isin(pairs)]
        parts.append(once.assign(name=[pairs[entry] for entry in once["entry"]]))
    found = pd.concat(parts)
    table = found[[*NAMES]].rename(columns=NAMES)
    table.index = pd.Index(list(found["name"]))
    return table
