"""The server's side of a run on Flower: how it reaches nodes."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from hierfl.engine.exact_sums import AskSum
from hierfl.flower.payloads import PAYLOAD, RECORD, payload_of
from hierfl.flower.secure import sum_of
from hierfl.nodes.messages import Answer, Refused
from hierfl.nodes.reached import Reached
from hierfl.nodes.run import TooFewNodes

ONCE_MORE = 1.0  # seconds between two looks for nodes
# seconds between two looks for answers: at first, at most, and by how much they grow
SOON, LATER, SLOWER = 0.05, 1.0, 1.2
AWAY = "its node is not connected"


@dataclass(frozen=True, eq=False)
class FlowerServer:
    """The server of fits over nodes: it waits for `count` of them, and a round needs `fewest`.

    `before` is called before anything is asked.
    """

    grid: Grid
    timeout: float
    count: int
    fewest: int = 1
    before: Callable[[], object] = bool

    def _there(self) -> list[int]:
        """Return the ids of `count` nodes or more; raise TooFewNodes after the timeout."""
        self.before()
        until = time.monotonic() + self.timeout
        while len(ids := list(self.grid.get_node_ids())) < self.count:
            if time.monotonic() > until:
                raise TooFewNodes(
                    f"{len(ids)} nodes are connected after {self.timeout:g} s, and {self.count} "
                    "are needed: start the others"
                )
            time.sleep(ONCE_MORE)
        return ids

    def send(self, kind: str, contents: Mapping[Any, bytes]) -> Iterator[Answer]:
        """Send payloads to nodes, and yield what comes back in time."""
        self.before()
        if kind == "round":
            there = set(self.grid.get_node_ids())
            yield from (Answer(number, None, AWAY) for number in contents if number not in there)
            contents = {number: of for number, of in contents.items() if number in there}
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord({PAYLOAD: content})}),
                dst_node_id=number,
                message_type="train" if kind == "round" else f"query.{kind}",
                ttl=2.0 * self.timeout,
            )
            for number, content in contents.items()
        ]
        for reply in self._replies(messages):
            number: Any = reply.metadata.src_node_id
            try:
                yield Answer(number, payload_of(reply))
            except Refused as error:
                yield Answer(number, None, str(error))

    def _replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send messages, and yield answers as they come; Flower's own loop looks every 3 s."""
        waits = set(self.grid.push_messages(messages))
        until, pause = time.monotonic() + self.timeout, SOON
        while waits and time.monotonic() < until:
            for reply in self.grid.pull_messages(waits):
                waits.discard(reply.metadata.reply_to_message_id)
                yield reply
            if waits:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                pause = min(LATER, SLOWER * pause)

    def reached(self, context: Context | None = None, send_recipe: bool = False) -> Reached:
        """Return the nodes, once enough of them are connected.

        With a `context` by secure aggregation; `send_recipe`: also that of a named method.
        """

        def ask_sum(ids: Mapping[str, int]) -> AskSum:
            assert context is not None
            return lambda contents, size: sum_of(
                self.grid, context, contents, ids, size, self.timeout
            )

        return Reached(
            self.send,
            self._there(),
            self.fewest,
            f"it did not answer within {self.timeout:g} s",
            send_recipe,
            None if context is None else ask_sum,
        )
