"""The gate of a node: all that leaves of its rows is of a registered kind, and passes `answer`.

What leaves is a function of the owner's rows, of parameters that the node has checked or computed,
and of its account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree
from hierfl.nodes import log
from hierfl.nodes.account import Entry, Ledger, digest
from hierfl.nodes.approval import asked_first
from hierfl.nodes.messages import ROUND, Message, Refused, from_bytes, read_json, read_typed
from hierfl.nodes.policy import Forbidden, Policy
from hierfl.nodes.row_sets import RowCodes, check_rows

FAILED = "failed question"  # of the account


class Inquiry(NamedTuple):
    """A request as a node has read it."""

    request: Any
    source: Any  # a `ClientRows` before a run, or a `Node` in one
    policy: Policy
    ledger: Ledger
    digest: str
    tree: Tree  # its tensors
    content: Mapping[str, Any]  # what it says of itself


class Release(NamedTuple):
    """Bytes that may leave, their tensors (None: they are JSON), and what the log calls them."""

    content: bytes
    tree: Tree | None = None
    what: str = ""
    more: Mapping[str, Any] = {}


class Reply(NamedTuple):
    """The rows behind each number of an answer, and what computes it once these may be told about."""

    rows: Sequence[RowCodes]
    make: Callable[[], Release]


@dataclass(frozen=True)
class Kind:
    """A kind of answer that may leave."""

    asks: str  # the transport's word for it
    request: type  # the dataclass that a request is read as
    # yields why the policy, or few rows, do not allow the answer to a request
    disclosure: Callable[[Inquiry], Iterable[Refused]]
    # yields answers, of fewer and fewer rows; the first one that may leave does
    handler: Callable[[Inquiry], Iterable[Reply]]
    account: str  # the account's and the log's word for it; "": the account needs no entry
    # what a request is about, in the account
    subject: Callable[[Inquiry], tuple[str, ...]] = lambda inquiry: ()
    # the answer that was given to it before; None: it is new
    earlier: Callable[[Inquiry], bytes | None] = lambda inquiry: None
    # what the owner approves beforehand; of a run, its preview is approved
    text: Callable[[Inquiry], str] | None = None
    counted: bool = True  # requests count, also where they fail; others are answered once
    # keeps an answer before it leaves, and returns more for the log
    keep: Callable[[Inquiry, Release], Mapping[str, Any]] = lambda inquiry, release: {}


KINDS: dict[str, Kind] = {}


def register(*names: str, **parts: Any) -> None:
    """Register kinds of answers; nothing else leaves a node, and none lacks its check."""
    kind = Kind(**parts)
    if not {*names}.isdisjoint(KINDS) or not callable(kind.disclosure):
        raise ValueError(f"a kind of {names} is registered, or lacks a check of its disclosure")
    KINDS.update(dict.fromkeys(names, kind))


@one_at_a_time
def answer(source: Any, asks: str, content: bytes) -> bytes:
    """Return a node's answer to a request; errors hold no value of its rows."""
    with log.answering(source.folder, source.run or None):
        policy = source.allowed()
        kind, request, message = _read(asks, content)
        ledger = Ledger.at(source.folder)
        inquiry = Inquiry(request, source, policy, ledger, digest(content), *message)
        for objection in kind.disclosure(inquiry):
            raise objection
        if kind.text is not None and policy.approve == "ask":
            asked_first(source.folder, kind.account or asks, kind.text(inquiry))
        entry = Entry(kind.account, inquiry.digest, source.run, tuple(kind.subject(inquiry)))
        again = kind.earlier(inquiry) if kind.counted else ledger.given(entry)
        if again is not None:
            tree: Tree | None = None if message.tree is None else {}
            return _left(inquiry, Release(again, tree, f"again: {kind.account}"))
        if kind.counted:
            return _replied(kind, inquiry, entry)
        ledger.check_limits(FAILED, "", inquiry.digest, policy, None)
        try:
            return _replied(kind, inquiry, entry)
        except Exception:
            ledger.append(Entry(FAILED, inquiry.digest))  # that it fails tells something
            raise


def _replied(kind: Kind, inquiry: Inquiry, entry: Entry) -> bytes:
    """Return the first answer of a handler whose rows may be told about, once the account has it."""
    refusal: Exception = Refused("nothing may be told")
    for reply in kind.handler(inquiry):
        # noise of the server's choice is no reason not to compare
        rows = reply.rows if inquiry.policy.budget is None else ()
        try:
            new_rows = check_rows(inquiry.ledger, rows, inquiry.policy.min_count)
        except Forbidden as error:
            refusal = error
            continue
        if kind.account and kind.counted:
            inquiry.ledger.append(entry)  # what fails, too
        release = reply.make()
        if not kind.counted:
            entry = replace(entry, answer=release.content.decode())
        if new_rows or not kind.counted:
            inquiry.ledger.append(replace(entry, rows=new_rows))
        more = {**release.more, **kind.keep(inquiry, release)}
        return _left(inquiry, release._replace(more=more), kind.account)
    raise refusal


def _read(asks: str, content: bytes) -> tuple[Kind, Any, Message]:
    """Return the kind of a request, the request as its type, and all of it; refuse any other."""
    message = from_bytes(content) if asks == ROUND else Message(None, read_json(content))
    if not isinstance(message.about, dict):
        raise Refused("it is not a request of a node: it is not a JSON object")
    about = {"kind": asks, **message.about}
    kind = KINDS.get(str(about["kind"]))
    if kind is None or kind.asks != asks:
        raise Refused(f"it asks for {str(about['kind'])[:40]!r}, which no node answers")
    called = f"request of the kind '{about['kind']}'"
    return kind, read_typed(kind.request, about, called), message


def _left(inquiry: Inquiry, release: Release, what: str = "") -> bytes:
    """Log what is about to leave, with the policy that lets it and the rows behind it, and return it."""
    source, policy = inquiry.source, inquiry.policy.said()
    more: Any = {**source.about, "run": source.run or None, "policy": policy, **release.more}
    return log.left(source.folder, release.content, release.what or what, tree=release.tree, **more)
