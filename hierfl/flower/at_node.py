"""The node's side of a run on Flower: what a node answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hierfl.core.disk import private_folder, write_private
from hierfl.data.clients import ClientData
from hierfl.flower.secure import asked_for, in_parts, masked
from hierfl.nodes.agreement import Agreement
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import at_node
from hierfl.nodes.client_state import Node, NodeFailed
from hierfl.nodes.messages import Refused
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
            except (Refused, NodeFailed, ValueError, OSError) as error:
                record[WRONG] = f"{type(error).__name__}: {error}"
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return answered

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
        if content:
            private_folder(folder)
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
            raise Refused(f"the node has agreed on no schema yet ({error})") from error
        formula = with_schema(formula, text)
        return replace(self.call, method=formula), formula.data(found)

    def _agree(self, content: bytes, context: Context) -> bytes:
        folder = Path(self.folder(context))
        private_folder(folder)
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
                found = json.loads((folder / AGREEMENT).read_bytes())
            except (OSError, ValueError) as error:
                raise Refused(f"the node has agreed on nothing yet ({error})") from error
            if not isinstance(found, dict):
                raise Refused("what it has agreed on is no JSON object")
            agreement = Agreement.from_json(found.get("agreement"))
            seed = found.get("seed")
            if not isinstance(seed, int):
                raise Refused(f"the server sends the seed {seed!r}")
            call, rows = self._read(context)
            self.ready[context.node_id] = node(
                at_node(call, found.get("method")),
                rows,
                agreement,
                folder,
                seed=seed,
                policy=self.policy(context),
            )
        return self.ready[context.node_id]


def payload_of(message: Message) -> bytes:
    """Return the bytes of a message, or raise Refused."""
    if message.has_error():
        raise Refused(f"Flower says: {message.error.reason or message.error.code}")
    record: Mapping[str, Any] = message.content.config_records.get(RECORD, ConfigRecord())
    if WRONG in record:
        raise Refused(str(record[WRONG])[:2000])
    found = record.get(PAYLOAD)
    if not isinstance(found, bytes):
        raise Refused("its message holds no payload of hierfl")
    return found
