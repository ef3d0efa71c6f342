"""The server's side of a run on Flower: what it asks nodes before and in the rounds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from hierfl.flower.at_node import PAYLOAD, RECORD, payload_of
from hierfl.flower.secure import sum_of
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Answer
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import Decided
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.gathering import check_enough, fit_introduced
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.node import run_name
from hierfl.nodes.run import TooFewNodes
from hierfl.nodes.together import AskSum
from hierfl.program.recipes import describe

ONCE_MORE = 1.0  # seconds between two looks for nodes
# seconds between two looks for answers: at first, at most, and by how much they grow
SOON, LATER, SLOWER = 0.05, 1.0, 1.2
ANOTHER = (
    "it would run another method, model or version of hierfl than this server: see that both have "
    "the same code, and that the nodes' app names no other method"
)


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes, as the server reaches them; `before` is called before anything is asked."""

    grid: Grid
    timeout: float
    before: Callable[[], object] | None = None

    def there(self, count: int) -> list[int]:
        """Return the ids of `count` nodes or more; raise TooFewNodes after the timeout."""
        self._begin()
        until = time.monotonic() + self.timeout
        while len(ids := list(self.grid.get_node_ids())) < count:
            if time.monotonic() > until:
                raise TooFewNodes(
                    f"{len(ids)} nodes are connected after {self.timeout:g} s, and {count} are "
                    "needed: start the others"
                )
            time.sleep(ONCE_MORE)
        return ids

    def introductions(self, ids: list[int], fewest: int, schema: bytes) -> dict[int, Introduction]:
        """Return how nodes introduce their clients, given a formula's schema; too few are refused."""
        found: dict[int, Introduction] = {}
        answers, refused = self._answers("query.introduce", ids, schema)
        for number, content in answers.items():
            try:
                found[number] = Introduction.from_json(read_json(content))
            except Refused as error:
                refused[number] = str(error)
        check_enough(found, refused, fewest, "introduce a client")
        return found

    def with_schema(self, call: FitCall, ids: list[int], fewest: int) -> tuple[FitCall, list[int]]:
        """Return the call with the schema of its formula, and the nodes that have agreed on it."""
        # here: pandas and formulae, which most models do not need
        from hierfl.formulas.formula import Formula
        from hierfl.nodes.agreed_schema import agreed_over

        assert isinstance(call.method, Formula)

        def send(asked: bytes) -> dict[int, bytes]:
            answers, refused = self._answers("query.schema", ids, asked)
            check_enough(answers, refused, fewest, "answer questions about the schema")
            ids[:] = answers
            return answers

        formula, left_out = agreed_over(call.method, send)
        ids = [number for number in ids if number not in left_out]
        check_enough(ids, left_out, fewest, "agree on a schema")
        return replace(call, method=formula), ids

    def _answers(
        self, kind: str, ids: list[int], content: bytes
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return what nodes answer before the rounds, and why others do not."""
        answers: dict[int, bytes] = {}
        refused = dict.fromkeys(ids, f"it did not answer within {self.timeout:g} s")
        for number, found in self._sent(kind, dict.fromkeys(ids, content)):
            if number in ids and isinstance(found, Refused):
                refused[number] = str(found)
            elif number in ids and isinstance(found, bytes):
                answers[number] = found
        return answers, {n: why for n, why in refused.items() if n not in answers}

    def agree(
        self, agreed: Mapping[str, Any], ids: Mapping[str, int], run: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Send nodes what all agreed on, and the method; return what each client starts from, or why not."""
        starts: dict[str, str] = {}
        others: dict[str, str] = {}
        answers, refused = self._answers(
            "query.agree", list(ids.values()), json.dumps(agreed).encode()
        )
        for name, number in ids.items():
            if number not in answers:
                others[name] = refused[number]
            elif (start := _start(answers[number], run)) is None:
                others[name] = ANOTHER
            else:
                starts[name] = start
        if 2 * list(others.values()).count(ANOTHER) >= len(ids):  # it is the server that differs
            raise TooFewNodes("; ".join(f"client '{name}': {why}" for name, why in others.items()))
        return starts, others

    def ask(self, contents: Mapping[str, bytes], ids: Mapping[str, int]) -> Iterator[Answer]:
        """Ask clients for a round."""
        self._begin()
        names = {number: name for name, number in ids.items()}
        there = set(self.grid.get_node_ids())
        for name in sorted(name for name in contents if ids[name] not in there):
            yield Answer(name, None, "its node is not connected")
        asked = {ids[name]: content for name, content in contents.items() if ids[name] in there}
        for number, found in self._sent("train", asked):
            if number in names and isinstance(found, Refused):
                yield Answer(names[number], None, str(found))
            elif number in names and not isinstance(found, Refused):
                yield Answer(names[number], found)

    def _begin(self) -> None:
        if self.before is not None:
            self.before()

    def _sent(
        self, kind: str, contents: Mapping[int, bytes]
    ) -> Iterable[tuple[int, bytes | Refused]]:
        """Send payloads to nodes, and yield what comes back in time."""
        self._begin()
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord({PAYLOAD: content})}),
                dst_node_id=number,
                message_type=kind,
                ttl=2.0 * self.timeout,
            )
            for number, content in contents.items()
        ]
        for reply in self._replies(messages):
            try:
                yield reply.metadata.src_node_id, payload_of(reply)
            except Refused as error:
                yield reply.metadata.src_node_id, error

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


def _start(content: bytes, run: str) -> str | None:
    """Return what a client says that it starts from; None: it would run something else."""
    try:
        said = read_json(content)
        return str(said["start"])[:100] if said["run"] == run else None
    except (Refused, KeyError, TypeError, IndexError):
        return None


# ------------------------------------------------------------ a fit
@dataclass(frozen=True, eq=False)
class Server:
    """The server of fits over nodes; it waits for `count` of them, a round needs `fewest`."""

    nodes: Nodes
    count: int
    fewest: int = 1

    def fit(
        self, call: FitCall, *, context: Context | None = None, send_recipe: bool = False
    ) -> FitOverNodes:
        """Run the fit over the nodes, with a `context` by secure aggregation; always send a chosen method's recipe."""
        there, schema = self.nodes.there(self.count), b""
        if call.lacks_schema:
            call, there = self.nodes.with_schema(call, there, self.fewest)
            formula: Any = call.method
            schema = formula.agreed.json().encode()
        found = self.nodes.introductions(there, self.fewest, schema)

        def agree(agreement: Agreement, run: Decided, ids: Mapping[str, int]) -> Any:
            recipe = describe(run.method) if send_recipe or run.why is not None else None
            every = {"agreement": agreement.as_json(), "method": recipe, "seed": call.seed}
            return self.nodes.agree(every, ids, run_name(run.method, agreement, call.seed))

        def ask_sum(ids: Mapping[str, int]) -> AskSum:
            assert context is not None
            grid, timeout = self.nodes.grid, self.nodes.timeout
            return lambda contents, size: sum_of(grid, context, contents, ids, size, timeout)

        return fit_introduced(
            call,
            found,
            self.fewest,
            agree,
            lambda ids: lambda contents: self.nodes.ask(contents, ids),
            None if context is None else ask_sum,
        )
