"""The node's side of a run on Flower: what a node answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hierfl.engine.supervised import Supervised
from hierfl.flower.payloads import PAYLOAD, RECORD, WRONG, asked_for, payload_of
from hierfl.flower.secure import check_masked, in_parts, masked
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.client_state import Node
from hierfl.nodes.policy import policy_at
from hierfl.nodes.stations import Station, said


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
                plain = self.secure and masking is None and kind == "round"
                answer = self._work((kind, content, context, folder, policy, plain), limits)
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
        self,
        kind: str,
        content: bytes,
        context: Context,
        folder: Path,
        policy: str | Path | None,
        plain: bool,
    ) -> bytes:
        if plain:
            check_masked(content)
        rows = partial(self.data, context)
        station = Station(self.call, rows, folder, policy, ready=self.ready)
        return station.safe_reply(kind, content, f"Flower run {context.run_id}")
