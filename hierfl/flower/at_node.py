"""The node's side of a run on Flower: what a node answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hierfl.engine.supervised import Supervised
from hierfl.flower.secure import asked_for, in_parts, masked
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.client_state import Node
from hierfl.nodes.messages import Refused
from hierfl.nodes.policy import policy_at
from hierfl.nodes.stations import Station, said

PAYLOAD, WRONG, RECORD = "payload", "wrong", "hierfl"


@dataclass(frozen=True, eq=False)
class Clients:
    """What every node does; a process keeps the nodes that it has set up."""

    call: FitCall
    data: Callable[[Context], Any]
    folder: Callable[[Context], str | Path]
    policy: Callable[[Context], str | Path | None]
    secure: bool = False
    ready: dict[Path, Node] = field(default_factory=dict)

    def app(self) -> ClientApp:
        """Return the app that answers messages."""
        app = ClientApp(mods=[masked] if self.secure else [])
        for kind in ("schema", "describe", "introduce", "agree"):
            app.query(kind)(self._answering(kind))
        app.train()(self._answering("round"))
        return app

    def _answering(self, kind: str) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            record, folder = ConfigRecord(), None
            try:
                folder, policy = Path(self.folder(context)), self.policy(context)
                masking = asked_for(message)
                content = payload_of(message) if masking is None else masking
                limits = policy_at(policy, folder).limits_of(content)
                answer = self._work((kind, content, context, folder, policy), limits)
                if masking is not None:
                    return Message(in_parts(answer), reply_to=message)
                record[PAYLOAD] = answer
            except Exception as error:  # whatever the owner's code or a crafted message raises
                record[WRONG] = said(error, folder)
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return answered

    @cached_property
    def _work(self) -> Supervised:
        return Supervised(lambda item: self._replied(*item))

    def _replied(
        self, kind: str, content: bytes, context: Context, folder: Path, policy: str | Path | None
    ) -> bytes:
        rows = partial(self.data, context)
        station = Station(self.call, rows, folder, policy, ready=self.ready)
        return station.safe_reply(kind, content, f"Flower run {context.run_id}")


def payload_of(message: Message) -> bytes:
    """Return the bytes of a message, or raise Refused."""
    if message.has_error():
        raise Refused(f"Flower says: {message.error.reason or message.error.code}"[:500])
    record: Mapping[str, Any] = message.content.config_records.get(RECORD, ConfigRecord())
    if WRONG in record:
        raise Refused(str(record[WRONG])[:500])
    content = record.get(PAYLOAD)
    if not isinstance(content, bytes):
        raise Refused("its message holds no payload of hierfl")
    return content
