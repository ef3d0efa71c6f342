"""A node: one client's rows on their own machine, and its answers, which its policy allows and its log records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, tree_map
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import FAILURES, client_round
from hierfl.engine.federation import federate
from hierfl.method import Clock, Method
from hierfl.nodes import client_state, gate, log
from hierfl.nodes.account import END, QUESTION, Entry, Ledger, digest, state_of
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.approval import write_preview
from hierfl.nodes.client_state import Node
from hierfl.nodes.gate import Inquiry, Release, Reply, register
from hierfl.nodes.messages import (
    AFTER,
    ROUND,
    NodeFailed,
    Refused,
    RoundRequest,
    StateRequest,
    check_numbers,
    like,
    to_bytes,
)
from hierfl.nodes.policy import FILE, Forbidden, Policy, policy_at
from hierfl.nodes.row_sets import rows_of_data, rows_of_formula
from hierfl.nodes.updates import check_message
from hierfl.program.failures import why_it_fails
from hierfl.program.read import read
from hierfl.program.recipes import describe
from hierfl.runs.preview import preview
from hierfl.runs.saved import start_of
from hierfl.summaries.row_noise import RowNoise

INTRODUCE, AGREE = "introduce", "agree"


def run_name(method: Method, agreement: Agreement, seed: int) -> str:
    """Return the name of a run: the same method, seed and clients have the same."""
    whole = json.dumps([describe(method), agreement.digest, seed], sort_keys=True, default=str)
    return digest(whole.encode())[:16]


def introduce(
    method: Method | None,
    data: ClientData,
    folder: str | Path,
    *,
    policy: str | Path | None = None,
    moved: Sequence[str] = (),
) -> bytes:
    """Return what a node reports about its client before the first round, as JSON."""
    root = Path(folder)
    allowed = policy_at(policy, root, own=method)
    return gate.answer(_BeforeRun(method, data, root, allowed, moved), INTRODUCE, b"{}")


@dataclass(frozen=True, eq=False)
class _BeforeRun:
    """A client that has not agreed on a run yet."""

    method: Method | None
    data: ClientData
    folder: Path
    policy: Policy
    moved: Sequence[str] = ()
    run: str = ""

    @property
    def about(self) -> Mapping[str, Any]:
        """What the log says of each answer."""
        return {"rows": self.data.num_rows}

    def allowed(self) -> Policy:
        """Refuse a method that the policy does not allow, and too few rows."""
        self.policy.check(self.method, self.data.num_rows)
        return self.policy

    @property
    def introduction(self) -> str:
        """What the node reports about its client."""
        return json.dumps(asdict(Introduction.of(self.data, self.moved)))


@dataclass(frozen=True)
class BareRequest:
    """A request that has nothing but its kind; what it goes by is in the node's folder."""

    kind: Literal["introduce", "agree"]


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
    brought: bool = False,
) -> Node:
    """Set up a node for a run, from what all agreed on.

    `folder` is private; `policy` a file, by default in it; a formula has read `frames`; a server `brought` the method.
    """
    root = Path(folder)
    allowed = policy_at(policy, root, own=method)
    with log.answering(root, of_owner=True):
        own = Introduction.of(data)
        agreement.check_own(own)
        allowed.check(method, own.rows)
        rows = replace(data, fields={name: data.fields[name] for name in agreement.form.fields})
        program = agreement.agreed(read(method.model, method.guide, rows, seed=seed))
        try:
            federation = federate(method, rows, seed=seed, program=program)
        except IndexError as error:
            raise Refused("the model has no place for codes that were agreed on") from error
        allowed.check_client(federation.client, rows)  # a preview takes steps
        run, key = run_name(method, agreement, seed), Ledger.at(root).key
        beside = program.reads.guide | {*filter(None, [federation.client.sums_by])}
        if others := sorted(beside - program.reads.model if brought else ()):
            what = f"the server's method reads field '{others[0][:80]}', which the node's model"
            raise Refused(f"{what} does not: leave it out (fields=, validation=)")
        reads = sorted((program.reads.model | beside) & rows.fields.keys())
        behind = rows_of_data(rows, reads or list(rows.fields), key)
        if frames is not None:
            from hierfl.formulas.own_rows import groups_of_few  # pandas
            from hierfl.formulas.read_rows import ReadRows

            why = groups_of_few(method.model, frames, allowed.min_count)
            if why and method.discloses == "summaries":
                raise Forbidden(why)
            behind = rows_of_formula(ReadRows.of(method.model, frames), key, exact=True)
        made = Node(method, federation, run, root, Path(policy or root / FILE), behind)
        if allowed.approve == "ask":
            write_preview(root, made.run, preview(run, method, federation))
        return made


def introduced(node: Node) -> dict[str, Any]:
    """Return what a node reports before a run's first round: a hash of what it starts from."""
    return dict(json.loads(gate.answer(node, AGREE, b"{}")))


def answer(node: Node, content: bytes) -> bytes:
    """Answer a message of the server: go through one round, or draw and predict after the last one."""
    return gate.answer(node, ROUND, content)


def _check_run(inquiry: Inquiry, tensors: set[str]) -> Iterator[Refused]:
    node, tree, run = inquiry.source, inquiry.tree, inquiry.request.run
    if run != node.run:
        yield Refused(f"it is of run '{run[:80]}', and this node is in '{node.run}'")
    if not isinstance(tree, dict) or {*tree} != tensors:
        yield Refused(f"it does not hold a {' and '.join(sorted(tensors))}, and nothing else")
    check_numbers(tree)


def _check_round(inquiry: Inquiry) -> Iterator[Refused]:
    yield from _check_run(inquiry, {"message", "mail"})
    if not inquiry.request.counted < inquiry.request.round:
        yield Refused(f"it asks for round {inquiry.request.round} after {inquiry.request.counted}")


def _update_before(inquiry: Inquiry) -> bytes | None:
    """Return the answer to the run's last request once more, and pay for it if a crash came first."""
    node, ledger = inquiry.source, inquiry.ledger
    how = node.federation.client.row_noise
    content = client_state.answer_again(node, inquiry.digest)
    paid = {(entry.run, entry.request) for entry in ledger.entries if entry.spent is not None}
    if content is not None and how is not None and (node.run, inquiry.digest) not in paid:
        _pay(inquiry, how)
    return content


def _update(inquiry: Inquiry) -> Iterator[Reply]:
    """Yield the client's update: values times weights."""
    node, ledger, policy = inquiry.source, inquiry.ledger, inquiry.policy
    request, how = inquiry.request, node.federation.client.row_noise
    message = inquiry.tree["message"]
    check_message(node.federation, node.method.name, message)
    ledger.check_limits("round", node.run, inquiry.digest, policy, node.method.most_rounds)
    if how is not None:
        ledger.check_budget(how, policy)

    def make() -> Release:
        before = client_state.state_after(node, request.counted)
        own = client_state.with_mail(node.federation.client, before, inquiry.tree["mail"])
        up, after = _one_round(node, message, own, request.round, policy)
        client_state.keep(
            node, client_state.ClientStates(request.round, request.counted, before, after)
        )
        about = {"run": node.run, "client": node.client, "round": request.round}
        return Release(to_bytes(up, about), up, "update", {"round_": request.round})

    yield Reply([node.behind], make)


def _keep_update(inquiry: Inquiry, release: Release) -> Mapping[str, Any]:
    how = inquiry.source.federation.client.row_noise
    client_state.keep_answer(inquiry.source, inquiry.digest, release.content)
    if how is None:
        return {}
    _pay(inquiry, how)
    return {"budget_spent": inquiry.ledger.share_spent(how, inquiry.policy)}


def _pay(inquiry: Inquiry, how: RowNoise) -> None:
    run, state = inquiry.source.run, (state_of(inquiry.tree),)
    inquiry.ledger.append(Entry("round", inquiry.digest, run, state, spent=how.spent_by_round))


def _one_round(
    node: Node, message: Tree, own: Tree, round_: int, policy: Policy
) -> tuple[Tree, Tree]:
    """Return what the client sends, values times weights, with 1 in front; and its new state."""
    client, rows, only = node.federation.client, node.batch, torch.zeros(1, dtype=torch.long)
    try:
        at_first = tree_map(lambda v: v[None], own)
        up, after = client_round(node.federation, client.phases, message, at_first, only, round_)
        check_numbers(up)
        # of few rows, or of about one that the server chose
        least = max(policy.min_rows / 4, min(policy.min_count / 4, node.rests_on_at_first / 8))
        few = client.rests_on and not client_state.rests_on(node, message, after) >= least
    except Exception as error:
        cause = error
        if isinstance(error, FAILURES) and not isinstance(error, Refused):
            cause = RuntimeError(why_it_fails("round", error, rows))
        why = f"round {round_}: client '{node.client}' fails: its log says why"
        raise NodeFailed(why) from cause
    if few:
        raise Forbidden(
            "the answer would rest on fewer rows than the node's policy asks for (min_rows, "
            "min_count)"
        )
    return up, tree_map(lambda v: v[0], after)


def _check_state(inquiry: Inquiry) -> Iterator[Refused]:
    """Refuse a question under parameters that the node has not received in the run, and too many questions."""
    node, ledger, tree = inquiry.source, inquiry.ledger, inquiry.tree
    yield from _check_run(inquiry, {"message", "mail", "rows"})
    if asks := inquiry.request.kind != END:
        ledger.check_limits(QUESTION, node.run, inquiry.digest, inquiry.policy, None)
    server, ends = node.federation.server, inquiry.request.ends
    if ends and not server.grows:
        like(tree["message"], server.last(server.state, Clock(0, 1)))
    ledger.check_state(node.run, state_of(tree), inquiry.policy, ends=ends, asks=asks)


def _end(inquiry: Inquiry) -> Iterator[Reply]:
    """Take the state that a run has ended with."""
    node = inquiry.source
    content = to_bytes({}, {"run": node.run, "client": node.client, "kind": END})
    yield Reply([], lambda: Release(content, {}, "end of the run"))


def _about_client(inquiry: Inquiry) -> Iterator[Reply]:
    """Yield what the policy lets out; anything else stays in the node's folder."""
    # here: it needs pandas and all that predictions need, which take half a second to import
    from hierfl.nodes.local_fit import answered, few_rows

    node, request, policy = inquiry.source, inquiry.request, inquiry.policy
    kind, more = request.kind, {"question": dict(inquiry.content)}
    about = {"run": node.run, "client": node.client, "kind": kind}
    stays = _stays(node, kind, not inquiry.tree["rows"], policy)

    def make() -> Release:
        few = few_rows(node, policy.min_count, inquiry.tree["rows"])
        ledger = None if stays else inquiry.ledger
        tree = answered(node, inquiry.tree, request, few, ledger, policy.min_count)
        if stays:
            return Release(to_bytes({}, {**about, "stays": stays}), {}, f"no {kind}", more)
        told_few = {name: few[name] for name in few.keys() & tree.keys()}
        return Release(to_bytes(tree, {**about, "few": told_few}), tree, kind, more)

    yield Reply([] if stays else [node.behind], make)


def _stays(node: Node, kind: str, of_own_rows: bool, policy: Policy) -> str:
    """Return why an answer stays at the node; "": it may leave."""
    of_own_rows &= kind in ("predictions", "scores")
    if kind == "imputed":
        return "missing values of rows stay at their node"
    if kind not in policy.may_leave:
        return f"the node's policy lets no {kind} leave: may_leave lacks '{kind}'"
    is_of_rows = (of_own_rows and kind == "predictions") or node.federation.client.keeps_rows
    if is_of_rows and "rows" not in policy.may_leave:
        return f"the node's policy lets no rows leave (may_leave), and these {kind} tell of single rows"
    if node.federation.data.num_rows < policy.min_count:
        return f"the client has fewer rows than the {policy.min_count} on which an answer must rest (min_count)"
    if of_own_rows and (policy.budget or node.federation.client.row_noise):
        return f"the rows have a budget, and {kind} of them have no noise"
    return ""


def _introduction(inquiry: Inquiry) -> Iterator[Reply]:
    yield Reply([], lambda: Release(inquiry.source.introduction.encode(), what="introduction"))


def _start(inquiry: Inquiry) -> Iterator[Reply]:
    node = inquiry.source
    start = {"run": node.run, "client": node.client, "start": start_of(node.federation)}
    yield Reply([], lambda: Release(json.dumps(start).encode(), what="start"))


bare = partial(register, request=BareRequest, disclosure=lambda inquiry: (), account="")
bare(INTRODUCE, asks=INTRODUCE, handler=_introduction, text=lambda of: of.source.introduction)
bare(AGREE, asks=AGREE, handler=_start)
in_run = partial(register, asks=ROUND, subject=lambda of: (state_of(of.tree),))
in_run(
    ROUND,
    request=RoundRequest,
    disclosure=_check_round,
    handler=_update,
    account="round",
    earlier=_update_before,
    keep=_keep_update,
)
after = partial(in_run, request=StateRequest, disclosure=_check_state)
after(END, handler=_end, account="")
after(*AFTER, handler=_about_client, account=QUESTION)
