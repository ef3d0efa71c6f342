"""A formula that came with a request, and all that it brings: whether an owner lists it, or allows its grammar."""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from hierfl.formulas.declaration import Missing
from hierfl.formulas.expressions import CODINGS, calls, within
from hierfl.formulas.formula import Formula
from hierfl.formulas.schema import STATEFUL
from hierfl.formulas.signatures import TERMS, named_arguments
from hierfl.models import families

# functions that are allowed by default
PLAIN = frozenset({*STATEFUL, *CODINGS, "mi", "cs", "offset"})
PART = re.compile(r";\s*(family|missing|clients|priors)\s*=([^;~`]*)$")  # after a listed formula


def is_listed(formula: Formula, line: str) -> bool:
    """Return whether a line of the policy is a request: a formula, which blanks do not change, and `PART`s of it.

    Without these the family is gaussian, no value may be missing, no prior is given, and clients are a group.
    """
    groups = {name for group in formula.declared.groups for name in group.by}
    parts = {"family": "gaussian", "missing": "refuse", "priors": ""}
    parts["clients"] = formula.clients if formula.clients in groups else ""
    while found := PART.search(line):
        parts[found[1]], line = found[2].strip(), line[: found.start()]

    def read(of: Formula) -> tuple[Any, ...]:
        family = of.family.name, of.family.link, of.family.likelihood
        return replace(of.declared.parts, text="", texts=()), family, of.clients, of.missing

    with suppress(ValueError):
        family, missing = families.named(parts["family"]), cast(Missing, parts["missing"])
        listed = Formula(line, family, parts["clients"], missing=missing)
        priors = {name.strip() for name in parts["priors"].split(",")}
        is_same = read(listed) == read(formula) and {*formula.priors} <= priors
        return is_same and not _brings(formula)
    return False


def _brings(formula: Formula) -> str:
    """Return what a request brings besides: a schema, on which nodes have not agreed, and matrices; "": neither."""
    return f"{formula.schema.json() if formula.schema else ''}{dict(formula.data2) or ''}"


def as_asked(formula: Formula, why: str) -> str:
    """Return what the owner approves: all that a request brings with its formula, in lines that it cannot forge."""
    declared, family, brings = formula.declared, formula.family, _brings(formula)
    priors = ", ".join(f"{name}: {prior}" for name, prior in sorted(formula.priors.items()))
    request = f"{formula.text}; family = {family.name}; missing = {formula.missing}"
    lines = [
        f"A formula that came with a request ({why}).",
        f"{request}; clients = {formula.clients}",
        f"Likelihood {family.likelihood}",
        f"Priors {priors or 'of hierfl'}",
        f"It reads the columns {', '.join(map(str, declared.columns_read))}.",
        brings and f"It brings {brings}.",
    ]
    return "\n".join(map(_in_line, lines))


def _in_line(text: str) -> str:
    """Return a text in one line, such that no other is written as it is: approval is of what is written."""
    signs = (of if of.isprintable() and of != "\\" else repr(of)[1:-1] for of in text)
    return "".join(signs)


def beyond(formula: Formula, columns: Collection[str], transforms: Collection[str] | None) -> str:
    """Return what a formula has beyond a grammar of columns in functions; "": nothing."""
    declared = formula.declared
    if _brings(formula):
        return "it brings a schema or matrices"
    read = {*map(str, declared.columns_read), formula.clients}  # whose value is the client's name
    if others := sorted(read.difference(columns)):
        return f"it reads {others[0]}, which the policy's columns do not list"
    for call in (call for terms in declared.described for call in calls(terms)):
        if (name := str(call.callee)) not in (PLAIN if transforms is None else transforms):
            return f"it has {name}(), which the policy's transforms do not list"
        if any(part.sign for part in within(call)):
            return f"'{call}' calculates with columns"
        if any(TERMS[name][argument].kind is float for argument in named_arguments(call)):
            return f"'{call}' has a bound, which values are held against"
    return "it has trunc()" if declared.parts.bounds else ""
