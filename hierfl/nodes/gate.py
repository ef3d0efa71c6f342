"""The gate of a node: what leaves of its rows before a run is of a registered kind, and passes here.

A kind has a typed request, the check of what may be disclosed, and a handler. What leaves is a
function of the owner's rows, of parameters that the node has checked or computed, and of its ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from hierfl.core.process import one_at_a_time
from hierfl.core.typed_json import read_as, written
from hierfl.formulas.columns import by_client
from hierfl.formulas.constants import Implausible
from hierfl.formulas.formula import Formula
from hierfl.nodes import log
from hierfl.nodes.account import AGAIN, Entry, Ledger, RowSet, digest
from hierfl.nodes.approval import asked_first
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import Rows, check_rows

MOST = 1 << 24  # bytes of a question


class Asked(NamedTuple):
    """A question of a server, and what a node answers it from."""

    request: Any
    formula: Formula
    client: str
    frame: pd.DataFrame
    policy: Policy
    ledger: Ledger


class Subject(NamedTuple):
    """What a question is about.

    Args:
        rows: which rows and columns; nothing of a formula, so that another one tells nothing new.
        place: of which the node answers one question.
        columns: the schema's columns, which must be the same in all questions about the rows.
        basis: what the schema of a fit must be.
    """

    rows: str
    place: str
    columns: str = ""
    basis: str = ""


class Told(NamedTuple):
    """An answer, and the rows behind each of its numbers."""

    answer: Any
    rows: list[Rows]


@dataclass(frozen=True)
class Kind:
    """A kind of answer that may leave.

    Args:
        name: in the ledger and the log.
        request: the dataclass that a question is read as.
        disclosure: refuses a question whose answer the policy, or a few rows, do not allow.
        handler: answers it, by sums and counts that `hierfl.formulas.disclosure` lets out; where it has
            several answers, of fewer and fewer rows, the first one leaves that may.
        subject: what it is about.
        text: what the owner is asked to approve.
    """

    name: str
    request: type
    disclosure: Callable[[Asked], None]
    handler: Callable[[Asked], Iterable[Told]]
    subject: Callable[[Asked], Subject]
    text: Callable[[Asked], str]

    @one_at_a_time
    def answer(
        self,
        formula: Formula,
        frames: Any,
        folder: str | Path,
        content: bytes,
        *,
        policy: str | Path | None = None,
    ) -> bytes:
        """Return a node's answer, as JSON, to a question about its client's rows; errors hold no value of them."""
        root = Path(folder)
        allowed = policy_at(policy, root)
        with log.answering(root):
            client, frame = only_client(formula, frames)
            _check_may_tell(formula, allowed, frame)
            try:
                request: Any = read_as(self.request, content, most=MOST)
            except ValueError as error:
                raise Refused(f"it is no question about rows ({str(error)[:300]})") from error
            asked = Asked(request, formula, client, frame, allowed, Ledger.at(root))
            self.disclosure(asked)
            if allowed.approve == "ask":
                asked_first(root, self.name, self.text(asked))
            answer, what = self._once(asked, digest(content))
            about: Any = {"question": json.loads(content), "rows": len(frame)}
            return log.left(root, answer.encode(), what, **about, policy=allowed.said())

    def _once(self, asked: Asked, request: str) -> tuple[str, str]:
        """Return the answer to a question, of which a node gives one for the same rows, and what it is."""
        subject, ledger = self.subject(asked), asked.ledger
        for entry in ledger.once(self.name):
            before = Subject(*entry.subject)
            if before[:2] == subject[:2] and entry.request == request:
                return entry.answer, f"again: {self.name}"
            if before[:2] == subject[:2] or (
                before.rows == subject.rows
                and subject.columns
                and before.columns not in ("", subject.columns)
            ):
                raise Refused(
                    f"it has answered a question of the kind '{self.name}' about these columns before, "
                    f"with other columns, groups, levels or constants: a node answers once; {AGAIN}"
                )
        told, new_rows = self._told(asked)
        answer = json.dumps({"client": asked.client, "answer": json.loads(written(told.answer))})
        ledger.append(Entry(self.name, request, subject=subject, answer=answer, rows=new_rows))
        return answer, self.name

    def _told(self, asked: Asked) -> tuple[Told, tuple[RowSet, ...]]:
        """Return the first answer of the handler whose rows may be told about, and those that are new."""
        refusal: Exception | None = None
        try:
            for told in self.handler(asked):
                try:
                    return told, check_rows(asked.ledger, told.rows, asked.policy.min_count)
                except Forbidden as error:
                    refusal = error
        except Implausible as error:
            raise Forbidden(str(error)) from error
        raise refusal or Refused("nothing may be told")


KINDS: dict[str, Kind] = {}


def register(
    name: str,
    request: type,
    *,
    disclosure: Callable[[Asked], None],
    handler: Callable[[Asked], Iterable[Told]],
    subject: Callable[[Asked], Subject],
    text: Callable[[Asked], str],
) -> Kind:
    """Register a kind of answer; nothing else answers questions about rows, and none lacks its check."""
    if name in KINDS or not callable(disclosure):
        raise ValueError(f"the kind '{name}' is registered, or lacks a check of what it discloses")
    KINDS[name] = Kind(name, request, disclosure, handler, subject, text)
    return KINDS[name]


def only_client(formula: Formula, frames: Any) -> tuple[str, pd.DataFrame]:
    """Return the name and the rows of a node's client; refuse rows of several."""
    clients = by_client(frames, formula.clients)
    if len(clients) != 1:
        raise Refused(
            f"a node has the rows of one client, and these are of {len(clients)}: start a "
            "node for each"
        )
    return next(iter(clients.items()))


def _check_may_tell(formula: Formula, allowed: Policy, frame: pd.DataFrame) -> None:
    """Refuse questions about rows that the policy does not allow, and rows that lack a column."""
    allowed.check(None, len(frame))
    if allowed.budget is not None:
        raise Forbidden(
            "the node's policy has a budget for each row, and counts and sums have no noise: "
            "agree on a schema beforehand"
        )
    if len(frame) < allowed.min_count:
        raise Forbidden(
            f"the node's policy tells of no fewer than {allowed.min_count} rows, and the client "
            "has fewer: agree on a schema beforehand"
        )
    for name in formula.declared.columns_read:
        if name not in frame.columns:
            raise Refused(f"the client's rows have no column '{name}', which the formula reads")
