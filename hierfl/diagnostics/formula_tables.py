"""The tables of a summary of a formula, as brms prints them."""

from collections.abc import Sequence

import pandas as pd

from hierfl.core.intervals import PROB, percent, tails
from hierfl.formulas.formula import Formula
from hierfl.formulas.layout import GroupTerm, Layout
from hierfl.formulas.writer import CENTERED, INTERCEPT, THRESHOLDS

# Column of the summary's frame -> as brms calls it, with the ends of a 90% interval.
NAMES = {"mean": "estimate", "sd": "est. error", "low": "5%", "high": "95%"}
Tables = tuple[tuple[str, pd.DataFrame], ...]


def titled(formula: Formula) -> str:
    """Return the formula, its family and which of two levels is 1, the first line of the summary."""
    family = formula.family
    levels = formula.agreed.columns[formula.declared.parts.labels[0]].levels
    of_one = f"; 1 is {levels[1]}" if family.kind == "binary" and levels else ""
    return f"{formula.text}, {family.name} with link {family.link}{of_one}"


def formula_tables(
    formula: Formula, frame: pd.DataFrame, clients: Sequence[str], prob: float = PROB
) -> Tables:
    """Return the tables of a summary's frame, each with its heading, without empty ones."""
    layout, layouts = formula.layout, formula.layouts
    groups = [term for found in layouts for term in found.groups]
    common = [INTERCEPT, *_common_sites(layout)]
    tables = [("Population level", _table(frame, common))]
    # in the frame alone
    common += [f"{THRESHOLDS}{CENTERED}", *(found.sampled_intercept for found in layouts)]
    for other in layouts[1:]:
        name = other.suffix.removeprefix("_")
        sites = [other.intercept, *_common_sites(other)]
        link = formula.parameters[name].declared.family.link
        tables.append((f"Population level of {name}, link {link}", _table(frame, sites)))
        common += sites
    smooths = [term for found in layouts for term in found.common.terms if term.smooth]
    scales = [site for term in smooths for site in term.scale_sites.values()]
    tables.append(("Smooth terms", _table(frame, scales)))
    common += [*scales, *(term.name for term in smooths)]
    for term in groups:
        tables.append(
            (f"Group level, {_groups(formula, term, len(clients))}", _spread(frame, term))
        )
    others = {*common, *(site for term in groups for site in term.sites)}
    left = [name for name in dict.fromkeys(frame["site"]) if name not in others]
    tables.append((f"Family, {formula.family.name}", _table(frame, left)))
    for term in groups:
        own = term.place in ("clients", "within")
        what = "own coefficients" if term.place == "clients" else "deviations"
        of = f"{term.site if ';' in formula.text else term.group.name}: {what}"
        of += " by client" if own else ""
        rows = frame if term.place != "within" else _named_inside(formula, term, frame)
        if curves := {c for c in term.columns if c not in term.entries}:  # in the frame alone
            rows = rows[~rows["entry"].str.endswith(tuple(curves))]
        tables.append((of, _table(rows, [term.site], shrinkage=own)))
    ends = dict(zip((NAMES["low"], NAMES["high"]), map(percent, tails(prob)), strict=True))
    return tuple((heading, table.rename(columns=ends)) for heading, table in tables if len(table))


def _common_sites(layout: Layout) -> list[str]:
    """Return the sites of the common terms."""
    return [site for term in layout.common.terms if not term.smooth for site in term.sites]


def _named_inside(formula: Formula, term: GroupTerm, frame: pd.DataFrame) -> pd.DataFrame:
    """Name the groups within clients where names are known, without those that a client lacks."""
    some = frame[frame["site"] == term.site]
    parts = some["entry"].str.partition(", ")
    known = [formula._inside.get((client, term.group.name)) for client in some["client"]]
    of = [
        (*n, *[None] * term.size)[int(k)] if n else k for n, k in zip(known, parts[0], strict=True)
    ]
    named = pd.Series(of, some.index, dtype=object)
    return some.assign(entry=named + parts[1] + parts[2])[named.notna()]


def _groups(formula: Formula, term: GroupTerm, clients: int) -> str:
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
    rho = frame[frame["site"] == f"rho_{term.site}"]
    parts += [rho.assign(name="rho")] if term.group.kind and len(rho) else []
    if term.cor:
        both = frame[frame["site"] == term.cor]
        pairs = {f"{a}, {b}": f"cor({a}, {b})" for i, a in enumerate(names) for b in names[i + 1 :]}
        once = both[both["entry"].isin(pairs)]
        parts.append(once.assign(name=[pairs[entry] for entry in once["entry"]]))
    found = pd.concat(parts)
    table = found[[*NAMES]].rename(columns=NAMES)
    table.index = pd.Index(list(found["name"]))
    return table
