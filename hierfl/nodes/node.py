"""A node: one client's rows on their own machine, and its answers, which its policy allows and its log records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, tree_map
from hierfl.data.batch import full_batch
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import FAILURES, client_round
from hierfl.engine.federation import federate
from hierfl.method import Clock, Method
from hierfl.nodes import log
from hierfl.nodes.account import END, Entry, Ledger, RowSet, digest, state_of
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.approval import asked_first, check_approved, preview, write_preview
from hierfl.nodes.client_state import (
    Kept,
    Node,
    answer_again,
    keep,
    keep_answer,
    state_after,
    with_mail,
)
from hierfl.nodes.messages import (
    Message,
    NodeFailed,
    Refused,
    check_numbers,
    from_bytes,
    like,
    to_bytes,
)
from hierfl.nodes.policy import FILE, Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import check_rows, rows_of_data, rows_of_formula
from hierfl.program.failures import why_it_fails
from hierfl.program.read import read
from hierfl.program.recipes import describe
from hierfl.runs.saved import start_of

MOST = 1 << 31  # bytes of a message to a node
MOST_ROUNDS = 1 << 31


def run_name(method: Method, agreement: Agreement, seed: int) -> str:
    """Return the name of a run: the same method, seed and clients have the same."""
    whole = json.dumps([describe(method), agreement.digest, seed], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def introduce(
    method: Method | None, data: ClientData, folder: str | Path, *, policy: str | Path | None = None
) -> bytes:
    """Return what a node reports about its client before the first round, as JSON."""
    root = Path(folder)
    allowed = policy_at(policy, root, own=method)
    with log.answering(root):
        Ledger.at(root)
        said = Introduction.of(data)
        allowed.check(method, said.rows)
        content = json.dumps(asdict(said)).encode()
        if allowed.approve == "ask":
            asked_first(root, "introduction", content.decode())
        return log.left(root, content, "introduction", rows=said.rows, policy=allowed.said())


@one_at_a_time
def node(
    method: Method,
    data: ClientData,
    agreement: Agreement,
    folder: str | Path,
    *,
    seed: int = 0,
    policy: str | Path | None = None,
    frames: Any = None,
) -> Node:
    """Set up a node for a run, from what all agreed on.

    `folder` is private, and `policy` a file, by default one in it; a formula has read `frames`.
    """
    root = Path(folder)
    allowed = policy_at(policy, root, own=method)
    with log.answering(root, of_owner=True):
        said = Introduction.of(data)
        if (said.client, said.rows) not in zip(agreement.names, agreement.rows, strict=True):
            raise ValueError(
                f"client '{said.client}' with {said.rows} rows is not among those that agreed: "
                "introduce it first"
            )
        allowed.check(method, said.rows)
        rows = replace(data, fields={name: data.fields[name] for name in agreement.form.fields})
        program = agreement.agreed(read(method.model, method.guide, rows, seed=seed))
        federation = federate(method, rows, seed=seed, program=program)
        run, key = run_name(method, agreement, seed), Ledger.at(root).key
        reads = sorted((program.reads.model | program.reads.guide) & rows.fields.keys())
        behind = rows_of_data(rows, reads or list(rows.fields), key)
        if frames is not None:
            behind = rows_of_formula(method.model, frames, key)
        made = Node(method, federation, run, root, Path(policy or root / FILE), behind)
        if allowed.approve == "ask":
            write_preview(root, made.run, preview(made))
        return made


def introduced(node: Node) -> dict[str, Any]:
    """Return what a node reports before a run's first round: a hash of what it starts from."""
    with log.answering(node.folder, node.run):
        policy = _allowed(node)
        said = {"run": node.run, "client": node.client, "start": start_of(node.federation)}
        _left(node, json.dumps(said).encode(), "start", policy, None)
        return said


@one_at_a_time
def answer(node: Node, content: bytes) -> bytes:
    """Answer a message of the server: go through one round, or draw and predict after the last one."""
    with log.answering(node.folder, node.run):
        asked = from_bytes(content, most=MOST)
        if asked.about.get("run") != node.run:
            run = str(asked.about.get("run"))[:80]
            raise Refused(f"it is of run '{run}', and this node is in '{node.run}'")
        policy, request = _allowed(node), digest(content)
        if asked.about.get("kind") == END:
            return _answer_end(node, asked, policy)
        if "kind" in asked.about:
            return _answer_question(node, asked, policy, request)
        return _answer_round(node, asked, policy, request)


def _allowed(node: Node) -> Policy:
    """Return the policy as it is now: the owner may have changed it during the run."""
    try:
        named = None if node.policy == node.folder / FILE else node.policy
        policy = policy_at(named, node.folder, own=node.method)
    except ValueError as error:
        raise Forbidden("the node's policy cannot be read: its owner must fix it") from error
    rows = node.federation.data.num_rows
    policy.check(node.method, rows)
    policy.check_client(node.federation.client, rows)
    if policy.approve == "ask":
        check_approved(node.folder, node.run)
    return policy


# ------------------------------------------------------------ a round
def _answer_round(node: Node, asked: Message, policy: Policy, request: str) -> bytes:
    round_: Any = asked.about.get("round")
    counted: Any = asked.about.get("counted")
    right = type(round_) is int and type(counted) is int and -1 <= counted < round_ < MOST_ROUNDS
    if not right:
        raise Refused(f"it asks for round {str(round_)[:20]!r} after {str(counted)[:20]!r}")
    if not isinstance(asked.tree, dict) or set(asked.tree) != {"message", "mail"}:
        raise Refused("it does not hold a message and mail, and nothing else")
    ledger, how = Ledger.at(node.folder), node.federation.client.row_noise
    entry = Entry("round", request, node.run, (state_of(asked.tree),))
    paid = entry if how is None else replace(entry, spent=how.spent_by_round)
    if (again := answer_again(node, request)) is not None:
        if how is not None and not ledger.is_paid(node.run, request):  # a crash
            ledger.append(paid)
        tree = from_bytes(again, most=MOST).tree
        return _left(node, again, "again: update", policy, tree)
    check_numbers(asked.tree)
    _check_message(node, asked.tree["message"])
    ledger.check_limits("round", node.run, request, policy, node.method.most_rounds)
    if how is not None:
        ledger.check_budget(how, policy)
    new_rows = _new_rows(node, ledger, policy)
    ledger.append(entry)  # what fails, too: that it fails tells something
    before = state_after(node, counted)
    own = with_mail(before, asked.tree["mail"])
    up, after = _one_round(node, asked.tree["message"], own, round_, policy)
    if new_rows:
        ledger.append(replace(entry, rows=new_rows))
    keep(node, Kept(round_, counted, before, after))
    content = to_bytes(up, {"run": node.run, "client": node.client, "round": round_})
    keep_answer(node, request, content)
    if how is not None:
        ledger.append(paid)
    spent = None if how is None else ledger.share_spent(how, policy)
    return _left(node, content, "update", policy, up, round_=round_, budget_spent=spent)


def _left(node: Node, content: bytes, what: str, policy: Policy, tree: Tree, **more: Any) -> bytes:
    """Log what is about to leave, with the policy that lets it and the rows behind it, and return it."""
    more |= {"rows": node.federation.data.num_rows, "method": node.method.name}
    return log.left(
        node.folder, content, what, run=node.run, tree=tree, policy=policy.said(), **more
    )


def _new_rows(node: Node, ledger: Ledger, policy: Policy) -> tuple[RowSet, ...]:
    """Return the rows behind an answer that are behind no earlier one; refuse those of few others.

    Noise alone is no reason not to compare: without a budget of the owner, the server says how much of it there is.
    """
    if policy.budget is not None:
        return ()
    return check_rows(ledger, [node.behind], policy.min_count)


def _check_message(node: Node, message: Tree) -> None:
    """Refuse a message of a round that the method's own server would not send."""
    server, refuses = node.federation.server, node.federation.client.refuses
    first = server.down(server.state, Clock(0, 1))
    if refuses is None:
        like(message, first)
    elif why := refuses(message, first) if isinstance(message, dict) else "it is no dict":
        raise Refused(f"its message is not of method '{node.method.name}': {why}")


def _one_round(
    node: Node, message: Tree, own: Tree, round_: int, policy: Policy
) -> tuple[Tree, Tree]:
    """Return what the client sends, values times weights, with 1 in front; and its new state."""
    federation, only = node.federation, torch.zeros(1, dtype=torch.long)
    at_first = tree_map(lambda v: v[None], own)
    try:
        up, after = client_round(
            federation, federation.client.phases, message, at_first, only, round_
        )
        check_numbers(up)
        few = _rests_on_few(node, message, after, policy)
    except Exception as error:
        cause = error
        if isinstance(error, FAILURES) and not isinstance(error, Refused):
            batch = full_batch(federation.rows, only)
            cause = RuntimeError(why_it_fails("round", error, batch))
        raise NodeFailed(
            f"round {round_}: client '{node.client}' fails: its log says why"
        ) from cause
    if few:
        raise Forbidden(
            "the answer would rest on fewer rows than the node's policy asks for (min_rows, "
            "min_count)"
        )
    return up, tree_map(lambda v: v[0], after)


def _rests_on_few(node: Node, message: Tree, after: Tree, policy: Policy) -> bool:
    """Return whether an update rests on fewer rows than the owner wants, or on about one that the server chose."""
    federation, rests_on = node.federation, node.federation.client.rests_on
    if rests_on is None:
        return False
    batch, server = full_batch(federation.rows, torch.zeros(1, dtype=torch.long)), federation.server
    none = tree_map(lambda v: v[None], federation.client.own)
    at_first = float(rests_on(server.down(server.state, Clock(0, 1)), none, batch))
    least = max(policy.min_rows / 4, min(policy.min_count / 4, at_first / 8))
    return not float(rests_on(message, after, batch)) >= least


# ------------------------------------------------------------ after the rounds
def _answer_end(node: Node, asked: Message, policy: Policy) -> bytes:
    """Take the state that a run has ended with."""
    _check_state(node, asked, Ledger.at(node.folder), policy)
    content = to_bytes({}, {"run": node.run, "client": node.client, "kind": END})
    return _left(node, content, "end of the run", policy, {})


def _check_state(node: Node, asked: Message, ledger: Ledger, policy: Policy) -> None:
    """Refuse a question under parameters that the node has not received in the run."""
    if not isinstance(asked.tree, dict) or set(asked.tree) != {"message", "mail", "rows"}:
        raise Refused("it does not hold a message, mail and rows, and nothing else")
    check_numbers(asked.tree)
    server, ends = node.federation.server, asked.about.get("ends") is True
    if ends and not server.grows:
        like(asked.tree["message"], server.last(server.state, Clock(0, 1)))
    ledger.check_state(node.run, state_of(asked.tree), policy, ends=ends)


def _answer_question(node: Node, asked: Message, policy: Policy, request: str) -> bytes:
    """Answer what the policy lets out; anything else stays in the node's folder."""
    # here: it needs pandas and all that predictions need, which take half a second to import
    from hierfl.nodes.local_fit import Question, answered, few_rows

    ledger, entry = Ledger.at(node.folder), Entry("question", request, node.run)
    ledger.check_limits("question", node.run, request, policy, None)
    question = Question.of(asked.about)
    _check_state(node, asked, ledger, policy)
    ledger.append(entry)
    few = few_rows(node, policy.min_count) if question.kind in ("summaries", "draws") else {}
    answer_tree = answered(node, asked, question, few)
    about: dict[str, Any] = {"run": node.run, "client": node.client, "kind": question.kind}
    asks = dict(asked.about)
    if why := _stays(node, question.kind, not asked.tree["rows"], policy):
        content = to_bytes({}, {**about, "stays": why})
        return _left(node, content, f"no {question.kind}", policy, {}, question=asks)
    if new_rows := _new_rows(node, ledger, policy):
        ledger.append(replace(entry, rows=new_rows))
    content = to_bytes(answer_tree, {**about, "few": few})
    return _left(node, content, question.kind, policy, answer_tree, question=asks)


def _stays(node: Node, kind: str, of_own_rows: bool, policy: Policy) -> str:
    """Return why an answer stays at the node; "": it may leave."""
    of_own_rows &= kind in ("predictions", "scores")
    if kind == "imputed":
        return "missing values of rows stay at their node"
    if kind not in policy.may_leave:
        return f"the node's policy lets no {kind} leave: may_leave lacks '{kind}'"
    if of_own_rows and kind == "predictions" and "rows" not in policy.may_leave:
        return "the node's policy lets no rows leave (may_leave), and predictions have a number for each of its rows"
    if node.federation.data.num_rows < policy.min_count:
        return f"the client has fewer rows than the {policy.min_count} on which an answer must rest (min_count)"
    if of_own_rows and (policy.budget or node.federation.client.row_noise):
        return f"the rows have a budget, and {kind} of them have no noise"
    return ""
