"""A client's rows before a run: what a node is asked about them, once, with its answers as JSON.

A formula that comes with a request may be a question about one patient,
`scale(income * exp(0 - abs(age - 97) * 50))`: it runs if the node's owner lists it, allows its
grammar, or approves it. One that the owner's own code or `node.toml` names is the owner's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from hierfl.core.arguments import check_known
from hierfl.core.typed_json import written
from hierfl.formulas import own_rows
from hierfl.formulas.brought import as_asked, beyond, is_listed
from hierfl.formulas.columns import by_client
from hierfl.formulas.formula import Formula
from hierfl.formulas.read_rows import ReadRows
from hierfl.formulas.schema import Implausible
from hierfl.nodes import gate, log
from hierfl.nodes.account import Entry, Ledger, digest
from hierfl.nodes.approval import asked_first
from hierfl.nodes.gate import Inquiry, Release, Reply
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import RowCodes, keep_in, kept_in

DESIGN, NUMBERS = "design", "numbers"  # columns whose sums are told, in the account
ToldColumns = Iterable[tuple[str, Any]]  # of one of these kinds, (N, p)
BEFOREHAND = "agree on a schema beforehand"


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The frame of a node's one client, which a formula reads."""

    formula: Formula
    client: str
    frame: pd.DataFrame
    folder: Path
    policy: Policy
    run: str = ""
    made: dict[int, ReadRows] = field(default_factory=dict)  # also for earlier questions

    def read(self, least: int) -> ReadRows:
        """Return the rows as the formula reads them, of which no number may rest on fewer than `least`."""
        if least not in self.made or self.made[least].frame is not self.frame:
            of = self.formula.declared, self.frame, self.client, least
            self.made[least] = ReadRows(*of)
        return self.made[least]

    @property
    def about(self) -> Mapping[str, Any]:
        """What the log says of each answer."""
        return {"rows": len(self.frame)}

    def allowed(self) -> Policy:
        """Refuse questions about rows that the policy does not allow, and rows that lack a column."""
        self.policy.check(None, len(self.frame))
        if self.policy.budget is not None:
            raise Forbidden(
                f"the policy has a budget for each row, and sums no noise: {BEFOREHAND}"
            )
        if len(self.frame) < (least := self.policy.min_count):
            raise Forbidden(f"the client has fewer rows than min_count, {least}: {BEFOREHAND}")
        for name in self.formula.declared.columns_read:
            if name not in self.frame.columns:
                raise Refused(f"the client's rows have no column '{name}', which the formula reads")
        return self.policy


def answer(
    asks: str,
    formula: Formula,
    frames: Any,
    folder: str | Path,
    content: bytes,
    *,
    policy: str | Path | None = None,
    read: dict[int, ReadRows] | None = None,
) -> bytes:
    """Return a node's answer, as JSON, to a question about its client's rows, as earlier questions `read` them."""
    root = Path(folder)
    allowed = policy_at(policy, root)
    with log.answering(root):
        own = only_client(formula, frames)
        source = ClientRows(formula, *own, root, allowed, made={} if read is None else read)
    return gate.answer(source, asks, content)


def only_client(formula: Formula, frames: Any) -> tuple[str, pd.DataFrame]:
    """Return the name and the rows of a node's client; refuse rows of several."""
    first, *others = by_client(frames, formula.clients).items()
    if others:  # a server may have named the column: how many values it has stays here
        what = f"a node has the rows of one client, and '{formula.clients}' names several"
        raise Refused(f"{what}: start a node for each")
    return first


def reply_of(
    inquiry: Inquiry, rows: list[RowCodes], answer: Callable[[], Any], told: ToldColumns = ()
) -> Reply:
    """Return what a question is answered by: rows, and an answer that is written as JSON, of sums of `told` columns."""
    own, least = inquiry.source, inquiry.policy.min_count

    def make() -> Release:
        try:
            content = json.loads(written(answer()))
            for kind, columns in told:
                check_told(kind, inquiry.ledger, columns, own.read(least))
        except Implausible as error:
            raise Forbidden(str(error)) from error
        made = json.dumps({"client": own.client, "answer": content}).encode()
        return Release(made, more={"question": inquiry.content})

    return Reply(rows, make)


def check_told(kind: str, ledger: Ledger, columns: Any, rows: ReadRows) -> None:
    """Refuse columns, (N, p), that with all whose sums were told of the rows tell of few of these (`Implausible`)."""
    if not columns.size:
        return
    earlier = {e.request: e for e in ledger.entries if e.kind in (DESIGN, NUMBERS)}
    names, content = own_rows.kept_columns(rows, columns, ledger.key)
    if (name := digest(content)) not in earlier:  # those are looked at already
        kept = partial(kept_in, ledger.folder)
        told = [(e.subject, kept(n), e.kind == DESIGN) for n, e in earlier.items()]
        own_rows.check_together([(names, content, kind == DESIGN), *told], rows, ledger.key)
        keep_in(ledger.folder, name, content)
        ledger.append(Entry(kind, name, subject=names))


def check_brought(formula: Any, folder: Path, policy: str | Path | None, frames: Any) -> None:
    """Refuse a formula that came with a request, until the node's owner approves it (`Forbidden`)."""
    with log.answering(folder):
        if not isinstance(formula, Formula):
            raise Forbidden("the request brings a model that is not a formula")
        allowed = policy_at(policy, folder)
        each = frames.values() if isinstance(frames, Mapping) else (frames,)
        there = {str(name) for frame in each for name in frame.columns}
        for name in sorted(allowed.columns or ()):
            check_known("the policy lists the column", name, there)
        if any(map(partial(is_listed, formula), allowed.formulas or ())):
            return
        why = "the node's policy lists no columns that formulas may read"
        if allowed.columns is not None:
            # of frames by client no column of clients is read
            named = {formula.clients} - {*getattr(frames, "columns", ())}
            why = beyond(formula, allowed.columns | named, allowed.transforms)
        if why:
            asked_first(folder, "formula", as_asked(formula, why))
