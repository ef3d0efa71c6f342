"""Table 1 and times over nodes: how a node describes its rows once, and how a server asks.

A node describes columns that its formula reads, if its policy has "descriptions" in `may_leave`. It
answers one question about a table and one about times, until its owner lets it answer another: the
difference of two answers would reveal the rows in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from msgspec import Meta

from hierfl.core.typed_json import written
from hierfl.formulas import own_rows
from hierfl.formulas.columns import complete, incomplete
from hierfl.formulas.odd_answers import odd_descriptions
from hierfl.formulas.read_rows import scattered
from hierfl.formulas.table_answers import (
    TableAnswer,
    rows_by_group,
    rows_with,
    table_answer,
    table_from_json,
)
from hierfl.formulas.time_answers import SurvivalAnswer, survival_answer, survival_from_json
from hierfl.nodes.account import Subject
from hierfl.nodes.agreement import named_answers
from hierfl.nodes.client_rows import NUMBERS, answer, reply_of
from hierfl.nodes.gate import Inquiry, Reply, register
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden
from hierfl.nodes.row_sets import RowCodes, rows_of_frame

ASKS, LEAVES = "describe", "descriptions"


@dataclass(frozen=True)
class DescriptionRequest:
    """What is asked: a "table" of columns or "times", by the values of a column ("": of all rows)."""

    kind: Literal["table", "times"]
    least: Annotated[int, Meta(ge=2, lt=1 << 26)]  # that a number rests on, whatever a policy says
    by: str
    columns: tuple[str, ...] = ()

    def content(self) -> bytes:
        """Return the question as bytes."""
        return written(self).encode()


def _disclosure(inquiry: Inquiry) -> Iterator[Refused]:
    """Yield why a question may not be answered: by the policy, or columns that the formula does not read."""
    question, policy = inquiry.request, inquiry.policy
    if LEAVES not in policy.may_leave:
        yield Forbidden(f"the node's policy lets no {LEAVES} leave: see may_leave in it")
    if question.least < policy.min_count:
        yield Forbidden(
            f"the node's policy needs {policy.min_count} rows for each number, not {question.least}: "
            f"ask by least_count={policy.min_count}"
        )
    names = {*question.columns, *([question.by] if question.by else [])}
    if others := sorted(names - {*inquiry.source.formula.declared.columns_read}):
        yield Refused(f"it reads {', '.join(others)[:200]}, which the formula does not")
    if len({*question.columns}) < len(question.columns):
        yield Refused("it names a column twice")


def _text(inquiry: Inquiry) -> str:
    question, formula = inquiry.request, inquiry.source.formula
    response = formula.declared.parts.response
    of = ", ".join(question.columns) if question.kind == "table" else response
    by = f", by the values of {question.by}" if question.by else ""
    return f"""A description of the rows ({question.kind}).
Formula {formula.text}
Counts, means, sds and cumulative counts leave the node, of {of}{by}.
Each rests on {question.least} rows or more."""


def _replies(inquiry: Inquiry) -> Iterator[Reply]:
    """Yield the answer about all rows, and about those of the formula, of which alone an earlier answer may be."""
    own = inquiry.source
    whole = ~incomplete(own.frame, own.formula.declared.rows_of, own.client, "drop")
    for rows in (np.ones(len(own.frame), dtype=bool), whole):
        description, behind, told = _description(inquiry, own.frame[rows], whole[rows])
        of_numbers = [(NUMBERS, scattered(told, rows))]
        yield reply_of(inquiry, behind, partial(lambda of: of, description), of_numbers)


def _description(
    inquiry: Inquiry, frame: pd.DataFrame, whole: Any
) -> tuple[TableAnswer | SurvivalAnswer, list[RowCodes], Any]:
    """Return an answer, the rows behind each of its numbers, and of which columns it has means and sds.

    `whole` rows lack nothing that the formula reads.
    """
    question, own, key = inquiry.request, inquiry.source, inquiry.ledger.key
    declared, client = own.formula.declared, own.client
    by, least = question.by or None, question.least
    labels = [by] if by else []
    if question.kind == "table":
        table = table_answer(frame, question.columns, by, client, least, whole)
        described = [
            (column, rows_with(frame, [column], group, whole, least))
            for name, group in rows_by_group(frame, by, client)
            for column, answer in table.groups.get(name, {}).items()
            if answer.found is not None
        ]
        codes = {c: rows_of_frame(frame, [c], key, labels) for c in question.columns}
        told = own_rows.described_numbers(frame, described, client, least)
        return table, [codes[column].where(rows) for column, rows in described], told
    columns = [declared.parts.response, *declared.parts.additions.values()]
    complete(frame, dict.fromkeys([*columns, *labels]), client, declared.missing)
    every = np.ones(len(frame), dtype=bool)
    frame = frame[rows_with(frame, [*columns, *labels], every, whole, least)]
    times = survival_answer(frame, declared, by, client, least)
    code = rows_of_frame(frame, columns, key, labels)
    groups = rows_by_group(frame, by, client)
    behind = [code.where(group) for name, group in groups if name in times.groups]
    return times, behind, np.zeros((len(whole), 0))


register(
    "table",
    "times",
    asks=ASKS,
    request=DescriptionRequest,
    disclosure=_disclosure,
    handler=_replies,
    account="description",
    subject=lambda of: Subject(  # of times, the formula says which they are
        "", of.request.kind, basis="" if of.request.columns else of.source.formula.text
    ),
    text=_text,
    counted=False,
)
answer_description = partial(answer, ASKS)


def answers_by_client(
    answers: Mapping[Any, bytes], question: DescriptionRequest
) -> tuple[dict[str, Any], dict[Any, str]]:
    """Return each client's answer, sorted by name, and why other nodes' answers are refused."""
    left_out: dict[Any, str] = {}

    def read(key: Any, client: str, content: Any) -> TableAnswer | SurvivalAnswer:
        if question.kind == "times":
            made: Any = survival_from_json(content, question.least)
        else:
            made = table_from_json(content, question.columns, question.least)
        if not question.by and not {*made.groups} <= {""}:
            raise Refused("it answers by groups that were not asked for")
        return made

    by_client, _ = named_answers(
        answers, read, left_out, partial(odd_descriptions, question.columns)
    )
    return by_client, left_out
