"""Table 1 and times over nodes: how a node describes its rows once, and how a server asks.

A node describes columns that its formula reads, if its policy has "descriptions" in `may_leave`. It
answers one question about a table and one about times, until its owner lets it answer another: the
difference of two answers would reveal the rows in which they differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import pandas as pd

from hierfl.core.process import one_at_a_time
from hierfl.formulas.columns import complete, incomplete, missing_in
from hierfl.formulas.formula import Formula
from hierfl.formulas.table_answers import (
    NumbersAnswer,
    TableAnswer,
    rows_by_group,
    table_answer,
    table_from_json,
)
from hierfl.formulas.time_answers import SurvivalAnswer, survival_answer, survival_from_json
from hierfl.nodes import log
from hierfl.nodes.agreed_schema import TWICE, check_may_tell, only_client
from hierfl.nodes.agreement import client_name
from hierfl.nodes.approval import asked_first
from hierfl.nodes.ledger import AGAIN, Entry, Ledger, digest
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.odd_answers import FAR
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import Rows, check_rows, rows_of_frame

LEAVES = "descriptions"
MOST = 1 << 26  # bytes of an answer
LEAST_ROWS = 2  # that a number rests on, whatever a policy says


@dataclass(frozen=True)
class Question:
    """What is asked: a "table" of columns or "times", by the values of a column ("": of all rows)."""

    ask: Literal["table", "times"]
    least: int
    by: str
    columns: tuple[str, ...] = ()

    def content(self) -> bytes:
        """Return the question as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of(content: bytes) -> Question:
        """Read the question of a server, or raise Refused."""
        found = read_json(content, MOST)
        known = isinstance(found, dict) and found.keys() == {"ask", "least", "by", "columns"}
        if not known or found["ask"] not in ("table", "times") or not isinstance(found["by"], str):
            raise Refused("it is no question about rows")
        columns, least = found["columns"], found["least"]
        if not isinstance(columns, list) or not all(isinstance(one, str) for one in columns):
            raise Refused("it is no question about rows: its columns are no list of names")
        if type(least) is not int or not LEAST_ROWS <= least < 1 << 26:
            raise Refused(f"it asks for numbers that rest on {str(least)[:20]} rows")
        return Question(found["ask"], least, found["by"], tuple(columns))


# ------------------------------------------------------------ a node
@one_at_a_time
def answer_description(
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
        asked = Question.of(content)
        client, frame = only_client(formula, frames)
        _check_question(formula, asked, allowed, frame)
        if allowed.approve == "ask":
            asked_first(root, "description", _said(formula, asked))
        answer, what = _answered_once(
            root, formula, asked, content, client, frame, allowed.min_count
        )
        about: Any = {"question": asdict(asked), "rows": len(frame), "policy": allowed.said()}
        return log.left(root, answer.encode(), what, **about)


def _check_question(
    formula: Formula, asked: Question, allowed: Policy, frame: pd.DataFrame
) -> None:
    """Refuse a question that the policy does not allow, or of columns that the formula does not read."""
    if LEAVES not in allowed.may_leave:
        raise Forbidden(f"the node's policy lets no {LEAVES} leave")
    check_may_tell(formula, allowed, frame)
    if asked.least < allowed.min_count:
        raise Forbidden(
            f"the node's policy needs {allowed.min_count} rows for each number, and the server asks for "
            f"numbers of {asked.least}: ask by least_count={allowed.min_count}"
        )
    if others := sorted(
        {*asked.columns, *([asked.by] if asked.by else [])} - {*formula.declared.columns_read}
    ):
        raise Refused(f"it reads {', '.join(others)[:200]}, which the formula does not")
    if len(set(asked.columns)) < len(asked.columns):
        raise Refused("it names a column twice")


def _said(formula: Formula, asked: Question) -> str:
    """Return what an owner is asked to approve."""
    of = ", ".join(asked.columns) if asked.ask == "table" else formula.declared.parts.response
    by = f", by the values of {asked.by}" if asked.by else ""
    return f"""A description of the rows ({asked.ask}).
Formula {formula.text}
Counts, means, sds and cumulative counts leave the node, of {of}{by}.
Each rests on {asked.least} rows or more."""


def _answered_once(
    root: Path,
    formula: Formula,
    asked: Question,
    content: bytes,
    client: str,
    frame: pd.DataFrame,
    least: int,
) -> tuple[str, str]:
    """Return the answer to a question, of which a node gives one of each kind, and what it is."""
    ledger, request = Ledger.at(root), digest(content)
    for entry in ledger.once(asked.ask):
        if entry.request == request:
            return entry.answer, "again: description"
        raise Refused(
            f"it has described its {'rows' if asked.ask == 'table' else 'times'} before, for another "
            f"question: a node answers once; {AGAIN}"
        )
    whole = ~incomplete(frame, formula.declared.rows_of, client, "drop")
    try:
        told, rows = _told(formula, asked, frame, client, whole, ledger.key)
        new_rows = check_rows(ledger, rows, least)
    except Forbidden:  # of other rows than an earlier answer, of which those of the formula may be
        told, rows = _told(formula, asked, frame[whole], client, whole[whole], ledger.key)
        new_rows = check_rows(ledger, rows, least)
    answer = json.dumps({"client": client, "answer": asdict(told)}, allow_nan=False)
    ledger.append(Entry(asked.ask, request, answer=answer, rows=new_rows))
    return answer, "description"


def _told(
    formula: Formula, asked: Question, frame: pd.DataFrame, client: str, whole: Any, key: bytes
) -> tuple[TableAnswer | SurvivalAnswer, list[Rows]]:
    """Return an answer, and the rows behind each of its numbers; `whole` rows lack nothing that the formula reads."""
    declared, by, least = formula.declared, asked.by or None, asked.least
    labels = [by] if by else []
    if asked.ask == "table":
        table = table_answer(frame, asked.columns, by, client, least, whole)
        described = [
            (column, _there(frame, [column], own, whole, least))
            for name, own in rows_by_group(frame, by, client)
            for column, answer in table.groups.get(name, {}).items()
            if answer.found is not None
        ]
        codes = {c: rows_of_frame(frame, [c], key, labels) for c in asked.columns}
        return table, [codes[column].where(rows) for column, rows in described]
    columns = [declared.parts.response, *declared.parts.additions.values()]
    complete(frame, dict.fromkeys([*columns, *labels]), client, declared.missing)
    every = np.ones(len(frame), dtype=bool)
    frame = frame[_there(frame, [*columns, *labels], every, whole, least)]
    times = survival_answer(frame, declared, by, client, least)
    code = rows_of_frame(frame, columns, key, labels)
    groups = rows_by_group(frame, by, client)
    return times, [code.where(own) for name, own in groups if name in times.groups]


def _there(frame: pd.DataFrame, columns: Sequence[str], of: Any, whole: Any, least: int) -> Any:
    """Return which rows `of` some have values of columns: without those that others lack, where these are few."""
    there = of & ~np.logical_or.reduce([missing_in(frame[name]) for name in columns])
    return there & whole if 0 < (there & ~whole).sum() < least else there


# ------------------------------------------------------------ the server
def answers_by_client(
    answers: Mapping[Any, bytes], question: Question
) -> tuple[dict[str, Any], dict[Any, str]]:
    """Return each client's answer, sorted by name, and why other nodes' answers are refused."""
    found: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    left_out: dict[Any, str] = {}
    for key, content in answers.items():
        try:
            said = read_json(content, MOST)
            if not isinstance(said, dict) or said.keys() != {"client", "answer"}:
                raise Refused("it answers without the name of its client")
            client = client_name(said["client"])
            if client in keys:
                left_out[keys[client]] = TWICE
                raise Refused(TWICE)
            keys[client] = key
            if question.ask == "table":
                found[client] = table_from_json(said["answer"], question.columns)
            else:
                found[client] = survival_from_json(said["answer"])
            if not question.by and not {*found[client].groups} <= {""}:
                raise Refused("it answers by groups that were not asked for")
        except ValueError as error:
            left_out[key] = str(error)[:300]
    left_out |= {keys[client]: why for client, why in _odd(found, question).items()}
    return {c: found[c] for c in sorted(found) if keys[c] not in left_out}, left_out


def _odd(found: Mapping[str, Any], question: Question) -> dict[str, str]:
    """Return the clients of which a column is of another kind than at most others, or far from theirs."""
    out: dict[str, str] = {}
    for name in question.columns if len(found) > 2 else ():
        of = {client: [p[name].found for p in one.groups.values()] for client, one in found.items()}
        kinds = {c: type(one).__name__ for c, each in of.items() for one in each if one is not None}
        (most, times), *_ = Counter(kinds.values()).most_common(1) or [("", 0)]
        if 2 * times > len(kinds):
            words = f"column '{name}' is of another kind there than at most others"
            out |= {client: words for client, kind in kinds.items() if kind != most}
        sizes = {
            client: max(
                (abs(n.mean) + n.sd for n in each if isinstance(n, NumbersAnswer)), default=0.0
            )
            for client, each in of.items()
        }
        usual = median(sizes.values())
        words = f"the values of '{name}' are more than {FAR:g} times those of most others"
        out |= {client: words for client, size in sizes.items() if size > FAR * usual > 0.0}
    return out
