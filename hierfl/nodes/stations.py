"""A station: a node as any transport reaches it, whose folder holds all that it has agreed on.

Requests are of the kinds of `hierfl.nodes.envelope`. What reads formulas needs pandas, which most models
do not: it is imported where it is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta

from hierfl.core.arguments import spelled
from hierfl.core.disk import private_folder, write_private
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.engine.supervised import Supervised, TooMuch, raise_if_memory
from hierfl.method import Method
from hierfl.nodes import log
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.client_state import Node
from hierfl.nodes.envelope import ASKS, read_request, write_answer
from hierfl.nodes.messages import NodeFailed, Refused, read_typed
from hierfl.nodes.node import answer, introduce, introduced, node
from hierfl.nodes.policy import Policy, policy_at
from hierfl.program.sites import Model

if TYPE_CHECKING:
    import pandas as pd

AGREEMENT, SCHEMA = "agreement.json", "schema.json"


@dataclass(frozen=True)
class Agreed:
    """What the server says that all agreed on, the seed, and the method's recipe, which need not be trusted."""

    agreement: Agreement
    seed: Annotated[int, Meta(gt=-(1 << 63), le=(1 << 63) - 1)]
    method: Any


class OwnRows(NamedTuple):
    """A call with the schema, the rows, the frames that they are of, and their columns with `moved` values."""

    call: FitCall
    data: ClientData
    frames: Any = None
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Station:
    """The node of one client, as a transport reaches it; `ready` has the nodes that were set up, by folder."""

    call: FitCall
    rows: Callable[[], Any]
    folder: Path
    policy: str | Path | None = None
    brought: bool = False  # the model came with the request, and is not the owner's
    ready: dict[Path, Node] = field(default_factory=dict)
    introduced: dict[Path, tuple[Policy, OwnRows]] = field(default_factory=dict)
    read: dict[int, Any] = field(default_factory=dict)  # for questions about the schema

    def answer(self, request: bytes, *, by: str | None = None) -> bytes:
        """Return the answer to a request of `hierfl.nodes.over`, to take back; it raises no error.

        What cannot be answered is answered by a text without a value of the rows; the node's log
        has the reason, and who asked, which only the transport can know (`by`).
        """
        log.ASKED_BY.set(by)
        try:
            limits = self.allowed.limits_of(request)
            return write_answer(request, self._work((*read_request(request), by), limits))
        except Exception as error:  # whatever the owner's code or a crafted message raises
            return write_answer(request, wrong=said(error, self.folder))

    @property
    def allowed(self) -> Policy:
        """The node's policy, as it is now; Refused in another folder than at first: a drive may be gone."""
        private_folder(self.folder)
        if not os.path.samestat(self._first, self.folder.stat()):
            raise Refused("the node's folder has been moved or replaced: its owner starts it again")
        return policy_at(self.policy, self.folder)

    @cached_property
    def _first(self) -> os.stat_result:
        return self.folder.stat()

    @cached_property
    def _work(self) -> Supervised:
        return Supervised(lambda item: self.safe_reply(*item))

    @one_at_a_time  # where it is not done in a process of its own
    def safe_reply(self, kind: str, content: bytes, by: str | None) -> bytes:
        """Return what `reply` does, or raise Refused of what may leave, once it is logged."""
        log.ASKED_BY.set(by)
        try:
            return self.reply(kind, content)
        except (Exception, SystemExit) as error:  # the owner's code may end, sys.exit("no file")
            raise_if_memory(error)
            refusal = Refused(said(error, self.folder))
            refusal.logged = True
            raise refusal from None

    def reply(self, kind: str, content: bytes) -> bytes:
        """Return what leaves the node in reply to the content of a request, or raise."""
        if kind not in ASKS:
            raise Refused(f"it asks for '{kind[:40]}', which no node answers")
        if self.brought:
            from hierfl.nodes.client_rows import check_brought

            check_brought(self.call.method, self.folder, self.policy, self.rows())
        if kind == "round":
            return answer(self._node(), content)
        if kind == "introduce":
            return self._introduce(content)
        if kind != "agree":
            return self._about_rows(kind, content)
        with log.answering(self.folder):
            read_typed(Agreed, content, "agreement")
            write_private(self.folder / AGREEMENT, content)
        self.ready.pop(self.folder, None)
        return json.dumps(introduced(self._node())).encode()

    def _about_rows(self, kind: str, content: bytes) -> bytes:
        formula: Any = self.call.model
        rows = self.rows()
        if isinstance(rows, ClientData) or not hasattr(formula, "declared"):
            raise Refused("this node's app has no formula and frames, of which alone nodes tell")
        about = formula, rows, self.folder, content
        if kind == "describe":
            from hierfl.nodes.describing import answer_description

            return answer_description(*about, policy=self.policy)
        if not self.call.lacks_schema:
            raise Refused("this node's app has no formula that lacks a schema")
        from hierfl.nodes.agreed_schema import answer_schema

        return answer_schema(*about, policy=self.policy, read=self.read)

    def _introduce(self, content: bytes) -> bytes:
        if content and self.call.lacks_schema:
            from hierfl.nodes.agreed_schema import check_answered, with_schema

            model: Any = self.call.method
            with log.answering(self.folder):
                check_answered(self.folder, with_schema(model, content), self.rows())
                write_private(self.folder / SCHEMA, content)
        self.read.clear()  # a later run reads its rows again
        own = self._read()
        self.introduced[self.folder] = self.allowed, own
        named = own.call.method if isinstance(own.call.method, Method) else None
        return introduce(named, own.data, self.folder, policy=self.policy, moved=own.moved)

    def _read(self) -> OwnRows:
        rows: Any = self.rows()
        formula: Any = self.call.method
        if isinstance(rows, ClientData):
            return OwnRows(self.call, rows)
        from hierfl.formulas.own_rows import fitted_rows
        from hierfl.nodes.agreed_schema import check_fitted, with_schema
        from hierfl.nodes.client_rows import only_client

        if self.call.lacks_schema:
            formula = with_schema(formula, self._agreed_on(SCHEMA))
        own = dict([only_client(formula, rows)])
        rows, moved = fitted_rows(formula, own)
        with log.answering(self.folder):
            check_fitted(self.folder, formula, own, rows, self.allowed)
        return OwnRows(replace(self.call, method=formula), formula.data(rows), rows, moved)

    def _agreed_on(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise Refused(f"the node has no {name.partition('.')[0]} yet") from error

    def _node(self) -> Node:
        """Return the node, set up from what was agreed on; a new process sets it up again."""
        if self.folder not in self.ready:
            agreed = read_typed(Agreed, self._agreed_on(AGREEMENT), "agreement")
            # of this run alone: another one reads its rows again
            policy, own = self.introduced.pop(self.folder, (None, None))
            if own is None or policy != self.allowed:
                own = self._read()
            method = own.call.made_by(agreed.method)
            how = {"frames": own.frames, "brought": method is not own.call.method}
            how |= {"seed": agreed.seed, "policy": self.policy}
            self.ready[self.folder] = node(method, own.data, agreed.agreement, self.folder, **how)
        return self.ready[self.folder]


@spelled
def station(
    model: Method | Model,
    rows: ClientData | pd.DataFrame | Mapping[str, pd.DataFrame],
    folder: str | Path,
    *,
    policy: str | Path | None = None,
    brought: bool = False,
) -> Station:
    """Return the node of one client for any transport: a function from a request's bytes to an answer's.

    A new process continues where the one before it ended: the folder holds what the node has agreed
    on, and the client state.

    Args:
        model: the same as at the server; the method is made from the server's recipe. Or a method:
            then only that one may run.
        rows: of the client; for a `hierfl.formula` a frame, or {client: frame}.
        folder: the node's private folder.
        policy: the file of its owner's policy. Default None: `policy.toml` in the folder.
        brought: the formula came with the request, as on vantage6: it runs if the node's policy
            allows it, or its owner approves it.
    """
    return Station(FitCall(model), lambda: rows, Path(folder), policy, brought)


def said(error: BaseException, folder: Path | None) -> str:
    """Return what may leave a node of an error, which its log has whole; without a folder it has none."""
    text = str(error) if isinstance(error, Refused | NodeFailed | TooMuch) else log.may_tell(error)
    if folder is not None and not getattr(error, "logged", False):
        with suppress(Exception):
            private_folder(folder)
            log.refused(folder, None, text, error)
    return text
