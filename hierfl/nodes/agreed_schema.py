"""A formula whose schema the nodes agree on first, by answers to `hierfl.formulas.questions`.

    server    query.schema   a question, with what is agreed so far
    node      counts and sums of its rows, logged before they leave
    server    query.introduce   the schema, which the node keeps and reads its frame by

The node reads the formula of its own app: a question about another column or transform is refused.
It names no level or group with fewer rows than its policy's `min_count`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hierfl.core.disk import private_folder
from hierfl.core.process import one_at_a_time
from hierfl.formulas.agree import agreed
from hierfl.formulas.columns import by_client
from hierfl.formulas.formula import Formula
from hierfl.formulas.questions import Question, answer_of_json, json_answer
from hierfl.formulas.schema import Schema
from hierfl.nodes import log
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import Forbidden, policy_at, policy_file

LEAST_COUNT = 5  # rows of a level or group that a server asks for
MOST = 1 << 24  # bytes of an answer, which has a few numbers a column


@one_at_a_time
def answer_schema(
    formula: Formula,
    frames: Any,
    folder: str | Path,
    content: bytes,
    *,
    policy: str | Path | None = None,
) -> bytes:
    """Return a node's answer to a question of the server, as JSON.

    Args:
        formula: of the node's app, without a schema.
        frames: the rows of its one client: a frame with the column of clients, or {client: frame}.
        folder: the node's.
        content: the question.
        policy: file of the owner's policy. Default None: `policy.toml` in the folder.

    Raises:
        ValueError: the rows are not as the formula needs them; client, column and value are named.
        Refused: the content is no question about these rows, or the policy forbids it
            (`Forbidden`).
    """
    root = Path(folder)
    private_folder(root)
    with log.refusals(root):
        clients = by_client(frames, formula.clients)
        if len(clients) != 1:
            raise ValueError(
                f"a node has the rows of one client, and these are of {len(clients)}: start a "
                "node for each"
            )
        ((client, frame),) = clients.items()
        allowed = policy_at(policy_file(root, policy))
        allowed.check(None, len(frame))
        try:
            asked = Question.of_json(content)
        except ValueError as error:
            raise Refused(str(error)) from error
        _check_counts(asked, allowed.min_count)
        try:
            answer = json_answer(asked, formula.declared, frame, client)
            found = {"client": client, "answer": answer}
        except (KeyError, TypeError) as error:
            raise ValueError(error.args[0]) from error
    return log.left(root, json.dumps(found).encode(), "schema")


def _check_counts(asked: Question, least: int) -> None:
    """Refuse to name levels, groups or bins of fewer rows than the owner allows."""
    wanted = asked.least if asked.schema is None else min(asked.least, asked.schema.min_count)
    if asked.kind in ("columns", "groups", "call") and wanted < least:
        raise Forbidden(
            f"the node's policy names no level of fewer than {least} rows, and the server asks "
            f"for those of {wanted}"
        )


def agreed_over(formula: Formula, send: Callable[[bytes], Iterable[bytes]]) -> Formula:
    """Return a formula with the schema that nodes agree on.

    Args:
        formula: without a schema, or with one of columns.
        send: sends a question to all nodes, and returns what each of them answers.

    Raises:
        KeyError, TypeError, ValueError: clients disagree; the message names client, column and
            value.
    """
    everyone: set[str] = set()

    def ask(question: Question) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for content in send(question.json().encode()):
            client, answer = _read(question, content)
            if client in found:
                raise ValueError(f"two nodes have a client '{client}': give each its own name")
            found[client] = answer
        if everyone and found.keys() != everyone:
            who = sorted(everyone ^ found.keys())[0]
            raise ValueError(f"client '{who}' did not answer all questions: start its node again")
        everyone.update(found)
        return dict(sorted(found.items()))

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
    return replace(formula, schema=schema)


def _read(question: Question, content: bytes) -> tuple[str, Any]:
    """Return the client of an answer, and the answer."""
    if len(content) > MOST:
        raise ValueError(f"a node answers '{question.kind}' by {len(content)} bytes")
    found = json.loads(content)
    if not isinstance(found, dict) or not isinstance(found.get("client"), str):
        raise ValueError(f"a node answers '{question.kind}' without the name of its client")
    return found["client"], answer_of_json(question, found.get("answer"))


def with_schema(formula: Formula, text: str | bytes) -> Formula:
    """Return a formula with a schema that was sent as JSON, or raise Refused."""
    try:
        schema = Schema.of_json(text.decode() if isinstance(text, bytes) else text)
    except ValueError as error:
        raise Refused(str(error)) from error
    if schema.formula != formula.text:
        raise Refused(f"the schema is of '{schema.formula}', and this node's formula is another")
    made = replace(formula, schema=schema)
    try:
        made.program()
    except (KeyError, ValueError) as error:
        raise Refused(
            f"the schema does not go with the formula ({type(error).__name__}: {error})"
        ) from error
    return made
