"""A station: a node as any transport reaches it, whose folder holds all that it has agreed on.

schema      of a formula without a schema: counts and sums (`agreed_schema`)
describe    of a formula: a table of its rows, or their times (`describing`)
introduce   it describes its client: name, number of rows, form of the rows
agree       it gets what all agreed on, and returns what it starts from
round       the method's message, and the client's update; after the rounds, a question
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hierfl.core.arguments import spelled
from hierfl.core.disk import private_folder, write_private
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.method import Method
from hierfl.nodes import log
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import at_node
from hierfl.nodes.client_state import Node
from hierfl.nodes.envelope import read_request, write_answer
from hierfl.nodes.messages import NodeFailed, Refused, read_json
from hierfl.nodes.node import answer, introduce, introduced, node
from hierfl.nodes.policy import Policy, policy_at
from hierfl.nodes.supervised import Supervised, raise_if_memory
from hierfl.program.sites import Model

if TYPE_CHECKING:
    import pandas as pd

AGREEMENT, SCHEMA = "agreement.json", "schema.json"


@dataclass(frozen=True, eq=False)
class Station:
    """The node of one client, as a transport reaches it; `ready` has the nodes that were set up, by folder."""

    call: FitCall
    rows: Callable[[], Any]
    folder: Path
    policy: str | Path | None = None
    brought: bool = False  # the model came with the request, and is not the owner's
    ready: dict[Path, Node] = field(default_factory=dict)

    def answer(self, request: bytes, *, by: str | None = None) -> bytes:
        """Return the answer to a request of `hierfl.nodes.over`, to take back; it raises no error.

        What cannot be answered is answered by a text without a value of the rows; the node's log
        has the reason, and who asked, which only the transport can know (`by`).
        """
        log.ASKED_BY.set(by)
        try:
            policy = self.allowed
            if len(request) > policy.bytes_a_request:
                raise Refused(
                    f"it has {len(request):,} bytes, and the node's policy allows "
                    f"{policy.bytes_a_request:,}: ask for less, or let its owner set a larger "
                    "bytes_a_request"
                )
            asked = (*read_request(request), by)
            return write_answer(request, self._work(asked, policy.limits))
        except Exception as error:  # whatever the owner's code or a crafted message raises
            return write_answer(request, wrong=said(error, self.folder))

    @property
    def allowed(self) -> Policy:
        """The node's policy, as it is now."""
        return policy_at(self.policy, self.folder)

    @cached_property
    def _work(self) -> Supervised:
        return Supervised(lambda asked: self.safe_reply(*asked))

    @one_at_a_time  # where it is not done in a process of its own
    def safe_reply(self, kind: str, content: bytes, by: str | None) -> bytes:
        """Return what `reply` does, or raise Refused of what may leave, once it is logged."""
        log.ASKED_BY.set(by)
        try:
            return self.reply(kind, content)
        except Exception as error:
            raise_if_memory(error)
            told = Refused(said(error, self.folder))
            told.logged = True
            raise told from None

    def reply(self, kind: str, content: bytes) -> bytes:
        """Return what leaves the node in reply to the content of a request, or raise."""
        work = {"schema": self._schema, "introduce": self._introduce, "agree": self._agree}
        work["describe"] = self._describe
        if kind != "round" and kind not in work:
            raise Refused(f"it asks for '{kind[:40]}', which no node answers")
        if self.brought:
            from hierfl.nodes.brought import check_brought  # pandas, as below

            check_brought(self.call.method, self.folder, self.policy)
        return answer(self._node(), content) if kind == "round" else work[kind](content)

    def _schema(self, content: bytes) -> bytes:
        # here: pandas, which most models do not need
        from hierfl.nodes.agreed_schema import answer_schema

        if not self.call.lacks_schema:
            raise Refused("this node's app has no formula that lacks a schema")
        formula: Any = self.call.method
        return answer_schema(formula, self.rows(), self.folder, content, policy=self.policy)

    def _describe(self, content: bytes) -> bytes:
        from hierfl.nodes.describing import answer_description  # pandas, as above

        rows, method = self.rows(), self.call.method
        formula: Any = method.model if isinstance(method, Method) else method
        if isinstance(rows, ClientData) or not hasattr(formula, "declared"):
            raise Refused("this node's app has no formula and frames, of which alone nodes tell")
        return answer_description(formula, rows, self.folder, content, policy=self.policy)

    def _introduce(self, content: bytes) -> bytes:
        if content and self.call.lacks_schema:
            from hierfl.nodes.agreed_schema import check_answered, with_schema

            with log.answering(self.folder):
                formula: Any = self.call.method
                made = with_schema(formula, content)
                allowed = policy_at(self.policy, self.folder)
                check_answered(self.folder, formula, self.rows(), made.agreed, allowed)
                write_private(self.folder / SCHEMA, content)
        call, rows = self._read()
        return introduce(call.named, rows, self.folder, policy=self.policy)

    def _read(self) -> tuple[FitCall, ClientData]:
        """Return the call and the rows; frames are read by the formula's schema."""
        found, formula = self.rows(), cast(Any, self.call.method)
        if isinstance(found, ClientData):
            return self.call, found
        if not self.call.lacks_schema:
            return self.call, formula.data(found)
        from hierfl.nodes.agreed_schema import with_schema

        try:
            text = (self.folder / SCHEMA).read_bytes()
        except OSError as error:
            raise Refused("the node has agreed on no schema yet") from error
        formula = with_schema(formula, text)
        return replace(self.call, method=formula), formula.data(found)

    def _agree(self, content: bytes) -> bytes:
        with log.answering(self.folder):
            _agreed(content)
            write_private(self.folder / AGREEMENT, content)
        self.ready.pop(self.folder, None)
        return json.dumps(introduced(self._node())).encode()

    def _node(self) -> Node:
        """Return the node, set up from what was agreed on; a new process sets it up again."""
        if self.folder not in self.ready:
            try:
                content = (self.folder / AGREEMENT).read_bytes()
            except OSError as error:
                raise Refused("the node has agreed on nothing yet") from error
            agreement, seed, recipe = _agreed(content)
            call, rows = self._read()
            frames = None if isinstance(read := self.rows(), ClientData) else read
            method, where = at_node(call, recipe), self.folder
            made = node(
                method, rows, agreement, where, seed=seed, policy=self.policy, frames=frames
            )
            self.ready[self.folder] = made
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

    A new process goes on where the one before it ended: what the node has agreed on, and the
    client state, are in its folder.

    Args:
        model: the same as at the server, by whose recipe the method is made; or a method, which
            alone may run then.
        rows: of the client; for a `hierfl.formula` a frame, or {client: frame}.
        folder: as for `node`.
        policy: as for `node`.
        brought: the formula came with the request, as on vantage6: it runs if the node's policy
            allows it, or its owner approves it.
    """
    return Station(FitCall(model), lambda: rows, Path(folder), policy, brought)


def said(error: Exception, folder: Path | None) -> str:
    """Return what may leave a node of an error, which its log has whole; without a folder it has none."""
    safe = isinstance(error, Refused | NodeFailed)
    text = str(error) if safe else log.may_tell(error)
    if folder is not None and not getattr(error, "logged", False):
        with suppress(Exception):
            private_folder(folder)
            log.refused(folder, None, text, error)
    return text


def _agreed(content: bytes) -> tuple[Agreement, int, Any]:
    """Return what the server says that all agreed on, the seed, and the method's recipe."""
    found = read_json(content)
    if not isinstance(found, dict):
        raise Refused("what it has agreed on is no JSON object")
    seed = found.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 1 << 64:
        raise Refused("the server sends no seed")
    return Agreement.from_json(found.get("agreement")), seed, found.get("method")
