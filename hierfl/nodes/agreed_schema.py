"""A formula whose schema the nodes agree on first, by answers to `hierfl.formulas.questions`.

A node names no level or group with fewer rows than `min_count`, and answers each question once: two
answers that differ in a few levels would tell of a few rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from hierfl.formulas import own_rows
from hierfl.formulas.agree import agreed
from hierfl.formulas.credible import Heard, check_margins
from hierfl.formulas.formula import Formula
from hierfl.formulas.odd_answers import odd_answers
from hierfl.formulas.questions import FIELDS, Question, answer_of_json, own_answer
from hierfl.formulas.read_rows import ReadRows
from hierfl.formulas.schema import Implausible, Schema
from hierfl.nodes.account import Ledger, Subject, digest
from hierfl.nodes.agreement import Key, named_answers
from hierfl.nodes.client_rows import DESIGN, NUMBERS, ToldColumns, answer, check_told, reply_of
from hierfl.nodes.gate import Inquiry, Reply, register
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.nodes.row_sets import rows_of_formula, rows_of_frame

LEAST_COUNT = 5  # rows of a level or group that a server asks for
ASKS = "schema"
OF_NUMBERS = ("columns", "call", "design")  # questions whose answers are sums
LATE = "; what all have agreed on before, such as means, counts its rows"
MARGINS = ("design", "response")  # of a schema: what answers to its last question determine
UNANSWERED = "it did not answer all questions"


def _disclosure(inquiry: Inquiry) -> Iterator[Refused]:
    """Yield why a question may not be answered: other columns than the formula's, few rows, fields of others."""
    question, formula, least = inquiry.request, inquiry.source.formula, inquiry.policy.min_count
    declared, schema, own = formula.declared, question.schema, FIELDS[question.kind]
    if not question.has_own_fields:
        yield Refused(f"a question of the kind '{question.kind}' has {', '.join(own) or 'nothing'}")
    counts = [question.least] if question.kind in ("columns", "groups", "call") else []
    counts += [] if schema is None else [schema.min_count]
    if counts and min(counts) < least:
        yield Forbidden(
            f"the node's policy names no level of fewer than {least} rows (min_count), and the server "
            f"asks for those of {min(counts)}: min_count = {min(counts)} would allow it"
        )
    if "by" in own:
        groupings = {*declared.groupings, *(group.by for group in declared.structured)}
        columns = {(name,) for name in declared.columns} if question.kind == "outside" else set()
        if question.by not in groupings | columns:
            yield Refused(f"it reads {', '.join(question.by)[:200]}, which the formula does not")
    if not {*question.known} <= {*declared.columns}:
        yield Refused("it knows levels of columns that the formula does not read")
    if schema is None:
        return
    kinds = {name: column.kind for name, column in schema.columns.items()}
    agreed_before = formula.schema  # of columns, which the owner's formula may begin with
    right = agreed_before and schema.columns == agreed_before.columns
    right = right or kinds.keys() == declared.columns.keys()
    right &= question.kind == "call" or schema.formula == formula.text
    if not right or any(kind not in (None, kinds[n]) for n, kind in declared.columns.items()):
        yield Refused("its schema is of other columns or another formula than the node's")


def _replies(inquiry: Inquiry) -> Iterator[Reply]:
    """Yield the answer; of sums and counts, `hierfl.formulas.questions` has those that may leave."""
    source, question = inquiry.source, inquiry.request
    rows = source.read(question.min_count)
    groups = None if question.kind in OF_NUMBERS else [n for n in question.by if n in rows.frame]
    behind = rows_of_formula(rows, inquiry.ledger.key, groups)
    answer = partial(own_answer, question, rows, source.formula.schema)
    yield reply_of(inquiry, [behind], answer, _told(question, rows))


def _told(question: Question, rows: ReadRows) -> ToldColumns:
    if question.kind in OF_NUMBERS:
        yield NUMBERS, own_rows.told_numbers(rows)
    if question.kind in OF_NUMBERS[1:]:
        yield DESIGN, own_rows.told_columns(rows, question)


def _subject(inquiry: Inquiry) -> Subject:
    """Return what a question is about: columns of rows, and for its transforms and design the formula."""
    question, source = inquiry.request, inquiry.source
    of = "" if question.schema is None else source.formula.declared.text
    place = json.dumps([question.kind, question.by, question.text, question.at is None, of])
    columns = "" if question.schema is None else _hash(question.schema, "columns")
    basis = _basis(question.schema) if question.kind == "design" else ""
    if question.kind == "outside":  # of all rows, so that another formula asks nothing new
        own = rows_of_frame(source.frame, [*{*question.by} & {*source.frame}], inquiry.ledger.key)
        return Subject(digest(json.dumps(sorted(own.row_set.columns.items())).encode()), place)
    about = _about(source.read(question.min_count), inquiry.ledger.key)
    least = "" if question.kind == "rows" else str(question.min_count)
    return Subject(about, place, columns, least, basis)


def _text(inquiry: Inquiry) -> str:
    formula = inquiry.source.formula
    columns = ", ".join(map(str, formula.declared.columns_read))
    return f"""Questions about the rows, so that clients agree on a schema.
Formula {formula.text}
Counts and sums leave the node, of columns {columns}.
Names of levels and groups with {inquiry.policy.min_count} rows or more leave it too."""


def _about(rows: ReadRows, key: bytes) -> str:
    """Return a name of rows, and of the columns that a formula reads, whatever a task calls the clients' column."""
    row_set = rows_of_formula(rows, key, exact=True).row_set
    whole = [sorted(row_set.columns.items()), sorted(rows.declared.columns.items())]
    return digest(json.dumps(whole).encode())


def _hash(schema: Schema, *names: str) -> str:
    whole = asdict(schema)
    return digest(json.dumps({name: whole[name] for name in names}, sort_keys=True).encode())


def _basis(schema: Schema) -> str:
    """Return a hash of all of a schema but its `MARGINS`."""
    return _hash(schema, *(of.name for of in fields(schema) if of.name not in MARGINS))


register(
    *FIELDS,
    asks=ASKS,
    request=Question,
    disclosure=_disclosure,
    handler=_replies,
    account=ASKS,
    subject=_subject,
    text=_text,
    counted=False,
)
answer_schema = partial(answer, ASKS)


class AgreedOver(NamedTuple):
    """A formula with the schema that nodes agree on, why others are not in it, and each one's client and rows."""

    formula: Formula
    left_out: dict[Any, str]
    clients: dict[Any, tuple[str, int | None]]  # None: they were not asked how many rows they have


def agreed_over(formula: Formula, send: Callable[[bytes], Mapping[Key, bytes]]) -> AgreedOver:
    """Let nodes agree on a schema, by what they answer."""
    clients: dict[Key, str] = {}
    left_out: dict[Key, str] = {}
    heard: dict[str, Heard] = {}

    def ask(question: Question) -> dict[str, Any]:
        def read(key: Key, client: str, content: Any) -> Any:
            if clients and clients.get(key) != client:
                raise Refused("it answers as another client than before, or not always")
            answer = answer_of_json(question, content)
            heard.setdefault(client, Heard()).check(question, answer, formula.declared)
            return answer

        contents, before = send(question.json().encode()), {*left_out}
        for key in clients.keys() - contents.keys():
            left_out.setdefault(key, UNANSWERED)
        unlike = partial(odd_answers, question)
        answers, keys = named_answers(contents, read, left_out, unlike)
        for key in left_out.keys() & clients.keys() - before:
            left_out[key] += LATE
        if not answers:
            why = "; ".join(f"'{key}': {why}" for key, why in left_out.items())
            raise ValueError(f"no node answers '{question.kind}' ({why}): start the nodes again")
        clients.clear()
        clients.update({keys[client]: client for client in answers})
        return answers

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
    of_nodes: dict[Any, Any] = {key: (name, heard[name].rows) for key, name in clients.items()}
    return AgreedOver(replace(formula, schema=schema, data2={}), left_out, of_nodes)


@lru_cache(maxsize=16)
def with_schema(formula: Formula, text: str | bytes) -> Formula:
    """Return a formula with a schema that was sent as JSON, or raise Refused."""
    read_json(text)
    try:
        schema = Schema.of_json(text.decode() if isinstance(text, bytes) else text)
        if schema.formula != formula.text:
            raise ValueError(f"it is of '{schema.formula}', and this node's formula is another")
        made = replace(formula, schema=schema, data2={})
        made.program()
    except (KeyError, ValueError) as error:
        why = f"{type(error).__name__}: {str(error)[:500]}"
        raise Refused(f"the schema does not go with the formula ({why})") from error
    return made


def check_answered(root: Path, formula: Formula, frames: Any) -> None:
    """Refuse a schema other than the node was asked about, or with margins that its rows cannot have."""
    ledger, schema = Ledger.at(root), formula.agreed
    asked = ((Subject(*e.subject), e.answer) for e in ledger.entries if e.kind == ASKS)
    answers = {(of.rows, of.basis): answer for of, answer in asked}
    subject = _about(ReadRows.of(formula, frames), ledger.key), _basis(schema)
    if subject not in answers:
        raise Refused("the schema is not the one that the node has answered questions about")
    answer = answer_of_json(Question("design"), json.loads(answers[subject])["answer"])
    try:
        check_margins(schema, answer)
    except Implausible as error:
        raise Refused(str(error)) from error


def check_fitted(root: Path, formula: Formula, own: Any, fitted: Any, policy: Policy) -> None:
    """Refuse a design of few of a client's `own` rows, as `fitted`, unless its schema names levels of single rows."""
    rows = ReadRows.of(formula, own, policy.min_count)
    try:
        if formula.agreed.min_count > 1:
            how = fitted[rows.client], rows.client, rows.least, policy.min_joint_count
            matrix = own_rows.check_design(formula, *how).matrix
            check_told(DESIGN, Ledger.at(root), rows.on_every_row(matrix), rows)
    except Implausible as error:
        raise Forbidden(str(error)) from error
