"""A formula that comes with a request: it runs if the node's owner lists it, allows its grammar, or approves it.

A formula can be a question about one patient: `scale(income * exp(0 - abs(age - 97) * 50))`. One that
the owner's own code or `node.toml` names is the owner's, and needs nothing of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hierfl.formulas.constants import STATEFUL
from hierfl.formulas.expressions import Operator, within
from hierfl.formulas.formula import Formula
from hierfl.formulas.functions import CODINGS
from hierfl.formulas.terms import calls
from hierfl.nodes import log
from hierfl.nodes.approval import asked_first
from hierfl.nodes.policy import Forbidden, policy_at

PLAIN = frozenset(
    {*STATEFUL, *CODINGS, "mi", "cs", "offset"}
)  # functions that are allowed by default


def check_brought(formula: Any, folder: Path, policy: str | Path | None) -> None:
    """Refuse a formula that came with a request, until the node's owner approves it (`Forbidden`)."""
    with log.answering(folder):
        allowed = policy_at(policy, folder)
        if not isinstance(formula, Formula):
            raise Forbidden("the request brings a model that is no formula")
        if _plain(formula.text) in map(_plain, allowed.formulas or ()):
            return
        why = "the node's policy lists no columns that formulas may read"
        if allowed.columns is not None:
            why = _beyond(formula, allowed.columns, allowed.transforms or PLAIN)
        if why:
            asked_first(folder, "formula", _text(formula, why))


def _plain(text: str) -> str:
    return "".join(text.split())


def _text(formula: Formula, why: str) -> str:
    """Return what the owner approves: all that a request brings with its formula."""
    declared = formula.declared
    priors = ", ".join(f"{name}: {prior}" for name, prior in sorted((formula.priors or {}).items()))
    return f"""A formula that came with a request ({why}).
Formula {formula.text}
Family {declared.family.name}; clients {formula.clients}; missing {declared.missing}
Priors {priors or "of hierfl"}
It reads the columns {", ".join(map(str, declared.columns_read))}."""


def _beyond(formula: Formula, columns: frozenset[str], transforms: frozenset[str]) -> str:
    """Return what a formula has beyond a grammar of columns in functions; "": nothing."""
    declared = formula.declared
    if others := sorted({*map(str, declared.columns_read)} - columns - {formula.clients}):
        return f"it reads {others[0]}, which the policy's columns do not list"
    for call in (call for found in declared.described for call in calls(found)):
        if (name := str(call.callee)) not in transforms:
            return f"it has {name}(), which the policy's transforms do not list"
        if any(isinstance(part, Operator) for part in within(call)):
            return f"'{call}' calculates with columns"
    return ""
