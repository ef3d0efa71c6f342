"""A client's rows before a run: what a node is asked about them, once, with its answers as JSON.

A formula that comes with a request may be a question about one patient,
`scale(income * exp(0 - abs(age - 97) * 50))`: it runs if the node's owner lists it, allows its
grammar, or approves it. One that the owner's own code or `node.toml` names is the owner's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd

from hierfl.core.typed_json import written
from hierfl.formulas.columns import by_client
from hierfl.formulas.constants import STATEFUL, Implausible
from hierfl.formulas.declaration import Missing
from hierfl.formulas.expressions import CODINGS, calls, within
from hierfl.formulas.formula import Formula
from hierfl.formulas.terms import OPTIONS, written_options
from hierfl.models import families
from hierfl.nodes import gate, log
from hierfl.nodes.approval import asked_first
from hierfl.nodes.gate import Inquiry, Release, Reply
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import RowCodes

BEFOREHAND = "agree on a schema beforehand"
# functions that are allowed by default
PLAIN = frozenset({*STATEFUL, *CODINGS, "mi", "cs", "offset"})
PART = re.compile(r";\s*(family|missing|clients|priors)\s*=([^;~`]*)$")  # after a listed formula


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The frame of a node's one client, which a formula reads."""

    formula: Formula
    client: str
    frame: pd.DataFrame
    folder: Path
    policy: Policy
    run: str = ""

    @property
    def about(self) -> Mapping[str, Any]:
        """What the log says of each answer."""
        return {"rows": len(self.frame)}

    def allowed(self) -> Policy:
        """Refuse questions about rows that the policy does not allow, and rows that lack a column."""
        allowed = self.policy
        allowed.check(None, len(self.frame))
        if allowed.budget is not None:
            raise Forbidden(
                f"the policy has a budget for each row, and sums no noise: {BEFOREHAND}"
            )
        if len(self.frame) < allowed.min_count:
            raise Forbidden(
                f"the client has fewer rows than the {allowed.min_count} of min_count: {BEFOREHAND}"
            )
        for name in self.formula.declared.columns_read:
            if name not in self.frame.columns:
                raise Refused(f"the client's rows have no column '{name}', which the formula reads")
        return allowed


def answer(
    asks: str,
    formula: Formula,
    frames: Any,
    folder: str | Path,
    content: bytes,
    *,
    policy: str | Path | None = None,
) -> bytes:
    """Return a node's answer, as JSON, to a question about its client's rows."""
    root = Path(folder)
    allowed = policy_at(policy, root)
    with log.answering(root):
        source = ClientRows(formula, *only_client(formula, frames), root, allowed)
    return gate.answer(source, asks, content)


def only_client(formula: Formula, frames: Any) -> tuple[str, pd.DataFrame]:
    """Return the name and the rows of a node's client; refuse rows of several."""
    first, *others = by_client(frames, formula.clients).items()
    if others:  # a server may have named the column: how many values it has stays here
        raise Refused(
            f"a node has the rows of one client, and '{formula.clients}' names several: start a "
            "node for each"
        )
    return first


def reply_of(inquiry: Inquiry, rows: list[RowCodes], answer: Callable[[], Any]) -> Reply:
    """Return what a question is answered by: rows, and an answer that is written as JSON."""

    def make() -> Release:
        try:
            content = json.loads(written(answer()))
        except Implausible as error:
            raise Forbidden(str(error)) from error
        made = json.dumps({"client": inquiry.source.client, "answer": content})
        return Release(made.encode(), more={"question": inquiry.content})

    return Reply(rows, make)


# ------------------------------------------------------------ a formula of a request
def check_brought(formula: Any, folder: Path, policy: str | Path | None) -> None:
    """Refuse a formula that came with a request, until the node's owner approves it (`Forbidden`)."""
    with log.answering(folder):
        allowed = policy_at(policy, folder)
        if not isinstance(formula, Formula):
            raise Forbidden("the request brings a model that is not a formula")
        if any(map(partial(_is_listed, formula), allowed.formulas or ())):
            return
        why = "the node's policy lists no columns that formulas may read"
        if allowed.columns is not None:
            why = _beyond(formula, allowed.columns, allowed.transforms or PLAIN)
        if why:
            asked_first(folder, "formula", _text(formula, why))


def _is_listed(formula: Formula, line: str) -> bool:
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
        return replace(of.declared.formulas, text="", texts=()), family, of.clients, of.missing

    with suppress(ValueError):
        family, missing = families.named(parts["family"]), cast(Missing, parts["missing"])
        listed = Formula(line, family, parts["clients"], missing=missing)
        priors = {name.strip() for name in parts["priors"].split(",")}
        return (
            read(listed) == read(formula) and {*formula.priors} <= priors and not _brings(formula)
        )
    return False


def _brings(formula: Formula) -> str:
    """Return what a request brings besides: a schema, on which nodes have not agreed, and matrices; "": neither."""
    return f"{formula.schema.json() if formula.schema else ''}{dict(formula.data2) or ''}"


def _text(formula: Formula, why: str) -> str:
    """Return what the owner approves: all that a request brings with its formula."""
    declared, family, brings = formula.declared, formula.family, _brings(formula)
    priors = ", ".join(f"{name}: {prior}" for name, prior in sorted(formula.priors.items()))
    request = f"{formula.text}; family = {family.name}; missing = {formula.missing}"
    return f"""A formula that came with a request ({why}).
{request}; clients = {formula.clients}
Likelihood {family.likelihood}
Priors {priors or "of hierfl"}
It reads the columns {", ".join(map(str, declared.columns_read))}.
{brings and f"It brings {brings}."}"""


def _beyond(formula: Formula, columns: frozenset[str], transforms: frozenset[str]) -> str:
    """Return what a formula has beyond a grammar of columns in functions; "": nothing."""
    declared = formula.declared
    if _brings(formula):
        return "it brings a schema or matrices"
    if others := sorted({*map(str, declared.columns_read)} - columns - {formula.clients}):
        return f"it reads {others[0]}, which the policy's columns do not list"
    for call in (call for terms in declared.described for call in calls(terms)):
        if (name := str(call.callee)) not in transforms:
            return f"it has {name}(), which the policy's transforms do not list"
        if any(part.sign for part in within(call)):
            return f"'{call}' calculates with columns"
        if any(OPTIONS[name][option].kind is float for option, _ in written_options(call)):
            return f"'{call}' has a bound, which values are held against"
    return "it has trunc()" if declared.parts.bounds else ""
