"""The node's side of a run on Flower: what a node answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hierfl.core.disk import write_private
from hierfl.data.clients import ClientData
from hierfl.flower.secure import asked_for, in_parts, masked
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import at_node
from hierfl.nodes.client_state import Node, NodeFailed
from hierfl.nodes.log import FAILS, answering, refused
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.node import answer, introduce, introduced, node

PAYLOAD, WRONG, RECORD = "payload", "wrong", "hierfl"
AGREEMENT, SCHEMA = "agreement.json", "schema.json"


@dataclass(frozen=True, eq=False)
class Clients:
    """What every node does; a process keeps the nodes that it has set up."""

    call: FitCall
    data: Callable[[Context], Any]
    folder: Callable[[Context], str | Path]
    policy: Callable[[Context], str | Path | None]
    secure: bool = False
    ready: dict[int, Node] = field(default_factory=dict)

    def app(self) -> ClientApp:
        """Return the app that answers messages."""
        app = ClientApp(mods=[masked] if self.secure else [])
        app.query("schema")(self._answering(self._answer_schema))
        app.query("introduce")(self._answering(self._introduce))
        app.query("agree")(self._answering(self._agree))
        app.train()(self._answering(self._train))
        return app

    def _answering(
        self, work: Callable[[bytes, Context], bytes]
    ) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            record = ConfigRecord()
            try:
                if (masking := asked_for(message)) is not None:
                    return Message(in_parts(work(masking, context)), reply_to=message)
                record[PAYLOAD] = work(payload_of(message), context)
            except Exception as error:  # whatever the owner's code or a crafted message raises
                record[WRONG] = self._said(error, context)
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return answered

    def _said(self, error: Exception, context: Context) -> str:
        """Return what may leave the node of an error, which its log has whole."""
        safe = isinstance(error, Refused | NodeFailed)
        text = str(error) if safe else FAILS
        if not getattr(error, "logged", False):
            with suppress(Exception):
                refused(Path(self.folder(context)), None, text, error)
        return text

    def _answer_schema(self, content: bytes, context: Context) -> bytes:
        # here: pandas and formulae, which most models do not need
        from hierfl.nodes.agreed_schema import answer_schema

        if not self.call.lacks_schema:
            raise Refused("this node's app has no formula that lacks a schema")
        formula: Any = self.call.method
        folder, policy = self.folder(context), self.policy(context)
        return answer_schema(formula, self.data(context), folder, content, policy=policy)

    def _introduce(self, content: bytes, context: Context) -> bytes:
        folder, policy = Path(self.folder(context)), self.policy(context)
        if content and self.call.lacks_schema:
            from hierfl.nodes.agreed_schema import check_answered, with_schema

            with answering(folder):
                formula: Any = self.call.method
                made = with_schema(formula, content)
                check_answered(folder, formula, self.data(context), made.agreed)
                write_private(folder / SCHEMA, content)
        call, rows = self._read(context)
        return introduce(call.named, rows, folder, policy=policy)

    def _read(self, context: Context) -> tuple[FitCall, ClientData]:
        """Return the call and the rows; frames are read by the formula's schema."""
        found, formula = self.data(context), cast(Any, self.call.method)
        if isinstance(found, ClientData):
            return self.call, found
        if not self.call.lacks_schema:
            return self.call, formula.data(found)
        from hierfl.nodes.agreed_schema import with_schema

        try:
            text = (Path(self.folder(context)) / SCHEMA).read_bytes()
        except OSError as error:
            raise Refused("the node has agreed on no schema yet") from error
        formula = with_schema(formula, text)
        return replace(self.call, method=formula), formula.data(found)

    def _agree(self, content: bytes, context: Context) -> bytes:
        folder = Path(self.folder(context))
        with answering(folder):
            _agreed(content)
            write_private(folder / AGREEMENT, content)
        self.ready.pop(context.node_id, None)
        return json.dumps(introduced(self._node(context))).encode()

    def _train(self, content: bytes, context: Context) -> bytes:
        return answer(self._node(context), content)

    def _node(self, context: Context) -> Node:
        """Return the node, set up from what was agreed on; a new process sets it up again."""
        if context.node_id not in self.ready:
            folder = Path(self.folder(context))
            try:
                content = (folder / AGREEMENT).read_bytes()
            except OSError as error:
                raise Refused("the node has agreed on nothing yet") from error
            agreement, seed, recipe = _agreed(content)
            call, rows = self._read(context)
            self.ready[context.node_id] = node(
                at_node(call, recipe),
                rows,
                agreement,
                folder,
                seed=seed,
                policy=self.policy(context),
            )
        return self.ready[context.node_id]


def _agreed(content: bytes) -> tuple[Agreement, int, Any]:
    """Return what the server says that all agreed on, the seed, and the method's recipe."""
    found = read_json(content)
    if not isinstance(found, dict):
        raise Refused("what it has agreed on is no JSON object")
    seed = found.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 1 << 64:
        raise Refused("the server sends no seed")
    return Agreement.from_json(found.get("agreement")), seed, found.get("method")


def payload_of(message: Message) -> bytes:
    """Return the bytes of a message, or raise Refused."""
    if message.has_error():
        raise Refused(f"Flower says: {message.error.reason or message.error.code}"[:500])
    record: Mapping[str, Any] = message.content.config_records.get(RECORD, ConfigRecord())
    if WRONG in record:
        raise Refused(str(record[WRONG])[:500])
    found = record.get(PAYLOAD)
    if not isinstance(found, bytes):
        raise Refused("its message holds no payload of hierfl")
    return found
