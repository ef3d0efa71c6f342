"""A client's rows before a run: what a node is asked about them, once, with its answers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from hierfl.core.typed_json import written
from hierfl.formulas.columns import by_client
from hierfl.formulas.constants import Implausible
from hierfl.formulas.formula import Formula
from hierfl.nodes import gate, log
from hierfl.nodes.gate import Inquiry, Release, Reply
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import Rows, rows_of_formula


@dataclass(frozen=True, eq=False)
class ClientRows:
    """The frame of a node's one client, which a formula reads."""

    formula: Formula
    client: str
    frame: pd.DataFrame
    folder: Path
    policy: Policy
    run: str = ""
    codes: dict[bytes, Rows] = field(default_factory=dict)

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
                "the node's policy has a budget for each row, and counts and sums have no noise: "
                "agree on a schema beforehand"
            )
        if len(self.frame) < allowed.min_count:
            raise Forbidden(
                f"the node's policy tells of no fewer than {allowed.min_count} rows, and the client "
                "has fewer: agree on a schema beforehand"
            )
        for name in self.formula.declared.columns_read:
            if name not in self.frame.columns:
                raise Refused(f"the client's rows have no column '{name}', which the formula reads")
        return allowed

    def coded(self, key: bytes) -> Rows:
        """Return the codes of the columns that the formula reads."""
        if key not in self.codes:
            self.codes[key] = rows_of_formula(self.formula, {self.client: self.frame}, key)
        return self.codes[key]


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
    clients = by_client(frames, formula.clients)
    if len(clients) != 1:
        raise Refused(
            f"a node has the rows of one client, and these are of {len(clients)}: start a "
            "node for each"
        )
    return next(iter(clients.items()))


def reply_of(inquiry: Inquiry, rows: list[Rows], answer: Callable[[], Any]) -> Reply:
    """Return what a question is answered by: rows, and an answer that is written as JSON."""

    def make() -> Release:
        try:
            content = json.loads(written(answer()))
        except Implausible as error:
            raise Forbidden(str(error)) from error
        made = json.dumps({"client": inquiry.source.client, "answer": content})
        return Release(made.encode(), more={"question": inquiry.content})

    return Reply(rows, make)
