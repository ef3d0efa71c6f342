"""A formula whose schema the nodes agree on first, by answers to `hierfl.formulas.questions`.

A node names no level or group with fewer rows than `min_count`, and answers each question once: two
answers that differ in a few levels would tell of a few rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from hierfl.core.process import one_at_a_time
from hierfl.formulas.agree import agreed
from hierfl.formulas.columns import by_client
from hierfl.formulas.constants import Implausible
from hierfl.formulas.formula import Formula
from hierfl.formulas.questions import Question, answer_of_json, call_of, json_answer
from hierfl.formulas.schema import Schema
from hierfl.nodes import log
from hierfl.nodes.agreement import client_name
from hierfl.nodes.approval import asked_first
from hierfl.nodes.ledger import AGAIN, Entry, Ledger, digest
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.odd_answers import check_answer, odd_answers
from hierfl.nodes.policy import Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import Rows, check_rows, rows_of_formula

LEAST_COUNT = 5  # rows of a level or group that a server asks for
MOST = 1 << 24  # bytes of an answer, which has a few numbers a column
TWICE = "two nodes have a client of that name: give each its own"
BASIS = ("clients", "formula", "min_count", "columns", "transforms", "groups")  # of a design


def only_client(formula: Formula, frames: Any) -> tuple[str, pd.DataFrame]:
    """Return the name and the rows of a node's client; refuse rows of several."""
    clients = by_client(frames, formula.clients)
    if len(clients) != 1:
        raise Refused(
            f"a node has the rows of one client, and these are of {len(clients)}: start a "
            "node for each"
        )
    return next(iter(clients.items()))


@one_at_a_time
def answer_schema(
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
        _, frame = only_client(formula, frames)
        _check_allowed(formula, allowed, frame, root)
        if len(content) > MOST:
            raise Refused(f"it has more than {MOST:,} bytes")
        try:
            asked = Question.of_json(content)
        except ValueError as error:
            raise Refused(str(error)[:500]) from error
        _check_question(formula, asked, allowed.min_count)
        answer, what = _answered_once(root, formula, asked, content, frames, allowed.min_count)
        about: Any = {"question": json.loads(content), "rows": len(frame), "policy": allowed.said()}
        return log.left(root, answer.encode(), what, **about)


def check_may_tell(formula: Formula, allowed: Policy, frame: pd.DataFrame) -> None:
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


def _check_allowed(formula: Formula, allowed: Policy, frame: pd.DataFrame, root: Path) -> None:
    """Refuse questions that the policy does not allow, or that its owner has not approved."""
    check_may_tell(formula, allowed, frame)
    if allowed.approve == "ask":
        columns = ", ".join(map(str, formula.declared.columns_read))
        text = f"""Questions about the rows, so that clients agree on a schema.
Formula {formula.text}
Counts and sums leave the node, of columns {columns}.
Names of levels and groups with {allowed.min_count} rows or more leave it too."""
        asked_first(root, "schema", text)


def _check_question(formula: Formula, asked: Question, least: int) -> None:
    """Refuse a question about other columns than the formula's, or about few rows."""
    declared, schema = formula.declared, asked.schema
    # least of `columns` and `groups`; of others it is the schema's
    wanted = [asked.least] if asked.kind in ("columns", "groups", "call") else []
    wanted += [] if schema is None else [schema.min_count]
    if wanted and min(wanted) < least:
        raise Forbidden(
            f"the node's policy names no level of fewer than {least} rows, and the server asks "
            f"for those of {min(wanted)}"
        )
    if asked.kind in ("outside", "groups"):
        groupings = {*declared.groupings}
        if "gr(" in declared.text or "car(" in declared.text:
            groupings |= {group.by for group in declared.structured}
        known = {*groupings, *((name,) for name in declared.columns)}
        if asked.by not in known or (asked.kind == "groups" and asked.by not in groupings):
            raise Refused(f"it reads {', '.join(asked.by)[:200]}, which the formula does not")
    if not set(asked.known) <= set(declared.columns):
        raise Refused("it knows levels of columns that the formula does not read")
    if schema is None:
        return
    kinds = {name: column.kind for name, column in schema.columns.items()}
    own = formula.schema  # of columns, which the owner's formula may begin with
    right = kinds.keys() == declared.columns.keys() or (own and schema.columns == own.columns)
    if not right or any(kind not in (None, kinds[n]) for n, kind in declared.columns.items()):
        raise Refused("its schema has other columns than the node's formula")
    if asked.kind == "call":
        try:
            call_of(declared, schema, asked.text)
        except ValueError as error:
            raise Refused(str(error)[:500]) from error


def _answered_once(
    root: Path, formula: Formula, asked: Question, content: bytes, frames: Any, least: int
) -> tuple[str, str]:
    """Return the answer to a question, of which a node gives one, for the same rows, and what it is."""
    place = json.dumps([asked.kind, asked.by, asked.text, asked.at is None])
    columns = "" if asked.schema is None else _hash(asked.schema, "columns")
    basis = _hash(asked.schema, *BASIS) if asked.schema and asked.kind == "design" else ""
    ledger, request = Ledger.at(root), digest(content)
    rows = rows_of_formula(formula, frames, ledger.key)
    about = _about(formula, rows)
    for entry in ledger.once("schema"):
        if entry.subject[0] != about:
            continue
        _, place_then, columns_then, _ = entry.subject
        if place_then == place and entry.request == request:
            return entry.answer, "again: schema"
        if place_then == place or (columns and columns_then not in ("", columns)):
            raise Refused(
                f"it was asked '{asked.kind}' of the same columns with other levels or constants: "
                f"a node answers once; {AGAIN}"
            )
    new_rows = check_rows(ledger, [rows], least)
    client, frame = only_client(formula, frames)
    try:
        said = json_answer(asked, formula.declared, frame, client)
    except Implausible as error:
        raise Forbidden(str(error)) from error
    answer = json.dumps({"client": client, "answer": said})
    subject = (about, place, columns, basis)
    ledger.append(Entry("schema", request, subject=subject, answer=answer, rows=new_rows))
    return answer, "schema"


def _about(formula: Formula, rows: Rows) -> str:
    """Return a name of a formula and the rows that it reads."""
    whole = [formula.text, formula.clients, sorted(rows.row_set.columns.items())]
    return digest(json.dumps(whole).encode())


def _hash(schema: Schema, *parts: str) -> str:
    whole = asdict(schema)
    return digest(json.dumps({part: whole[part] for part in parts}, sort_keys=True).encode())


# ------------------------------------------------------------ the server
Key = TypeVar("Key")  # of a node, to the transport


def agreed_over(
    formula: Formula, send: Callable[[bytes], Mapping[Key, bytes]]
) -> tuple[Formula, dict[Key, str]]:
    """Return a formula with the schema that nodes agree on, and the nodes that are not in it, with reasons."""
    clients: dict[Key, str] = {}
    left_out: dict[Key, str] = {}

    def ask(question: Question) -> dict[str, Any]:
        found: dict[str, Any] = {}
        keys: dict[str, Key] = {}
        for key, content in send(question.json().encode()).items():
            try:
                client, said = _client_of(question, content)
                if client in keys:
                    left_out.setdefault(keys[client], TWICE)
                    raise Refused(TWICE)
                if clients and clients.get(key) != client:
                    raise Refused("it answers as another client than before, or not always")
                keys[client], found[client] = key, answer_of_json(question, said)
                check_answer(question, found[client], formula.declared.columns)
            except ValueError as error:
                left_out.setdefault(key, str(error)[:500])
        for key in clients.keys() - keys.values():
            left_out.setdefault(key, "it did not answer all questions")
        found = {c: found[c] for c in sorted(found) if keys[c] not in left_out}
        for client, why in odd_answers(question, found).items():
            left_out[keys[client]] = why
        found = {client: one for client, one in found.items() if keys[client] not in left_out}
        if not found:
            why = "; ".join(f"'{key}': {why}" for key, why in left_out.items())
            raise ValueError(f"no node answers '{question.kind}' ({why}): start the nodes again")
        clients.clear()
        clients.update({keys[client]: client for client in found})
        return found

    start = formula.schema
    if start is not None:
        start = replace(start, min_count=max(start.min_count, LEAST_COUNT))
    schema = agreed(
        ask,
        formula.clients,
        formula.declared.columns,
        formula.declared,
        units={},
        levels={},
        min_count=LEAST_COUNT if start is None else start.min_count,
        rare="refuse",
        start=start,
    )
    # the schema has what the matrices say, and the nodes' own formula has none
    return replace(formula, schema=schema, data2={}), left_out


def _client_of(question: Question, content: bytes) -> tuple[str, Any]:
    """Return the client of an answer, and what it says."""
    found = read_json(content, MOST)
    if not isinstance(found, dict) or not isinstance(found.get("client"), str):
        raise Refused(f"a node answers '{question.kind}' without the name of its client")
    return client_name(found["client"]), found.get("answer")


def with_schema(formula: Formula, text: str | bytes) -> Formula:
    """Return a formula with a schema that was sent as JSON, or raise Refused."""
    read_json(text, MOST)
    try:
        schema = Schema.of_json(text.decode() if isinstance(text, bytes) else text)
    except ValueError as error:
        raise Refused(str(error)[:500]) from error
    if schema.formula != formula.text:
        raise Refused(f"the schema is of '{schema.formula}', and this node's formula is another")
    made = replace(formula, schema=schema, data2={})
    try:
        made.program()
    except (KeyError, ValueError) as error:
        raise Refused(
            f"the schema does not go with the formula ({type(error).__name__}: {str(error)[:500]})"
        ) from error
    return made


def check_answered(root: Path, formula: Formula, frames: Any, schema: Schema) -> None:
    """Refuse a schema of other columns, groups or constants than the node was asked about."""
    ledger = Ledger.at(root)
    about = _about(formula, rows_of_formula(formula, frames, ledger.key))
    of = (about, _hash(schema, *BASIS))
    if not any(e.kind == "schema" and (e.subject[0], e.subject[3]) == of for e in ledger.entries):
        raise Refused("the schema is not the one that the node has answered questions about")
