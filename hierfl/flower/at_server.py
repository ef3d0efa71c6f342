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
from hierfl.nodes.choosing import decided
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import Refused
from hierfl.nodes.node import run_name
from hierfl.nodes.run import TooFewNodes, fit_nodes
from hierfl.nodes.together import Summed
from hierfl.program.recipes import describe

ONCE_MORE = 1.0  # seconds between two looks for nodes
# seconds between two looks for answers: at first, at most, and by how much they grow
SOON, LATER, SLOWER = 0.05, 1.0, 1.2


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes, as the server reaches them.

    Args:
        grid: of the run.
        timeout: seconds that the server waits for nodes, and for their answers.
        before: called before anything is asked. Default None: nothing is.
    """

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

    def introductions(self, ids: list[int], count: int, schema: bytes) -> dict[int, Introduction]:
        """Return how `count` nodes or more introduce their clients, given a formula's schema."""
        found = self._answers("query.introduce", ids, count, schema)
        return {number: Introduction.from_json(json.loads(found[number])) for number in found}

    def with_schema(self, call: FitCall, ids: list[int]) -> FitCall:
        """Return the call once the nodes have agreed on the schema of its formula.

        Raises:
            TooFewNodes: a node cannot answer, or does not.
            KeyError, TypeError, ValueError: clients disagree.
        """
        # here: pandas and formulae, which most models do not need
        from hierfl.formulas.formula import Formula
        from hierfl.nodes.agreed_schema import agreed_over

        assert isinstance(call.method, Formula)

        def send(asked: bytes) -> Iterable[bytes]:
            return self._answers("query.schema", ids, len(ids), asked).values()

        return replace(call, method=agreed_over(call.method, send))

    def _answers(self, kind: str, ids: list[int], count: int, content: bytes) -> dict[int, bytes]:
        """Return what nodes answer before the rounds."""
        answers: dict[int, bytes] = {}
        for number, found in self._sent(kind, dict.fromkeys(ids, content)):
            if isinstance(found, Refused):
                raise TooFewNodes(f"node {number} cannot introduce its client: {found}")
            answers[number] = found
        if len(answers) < count:
            raise TooFewNodes(
                f"{len(answers)} of {len(ids)} nodes introduced their clients, and {count} are "
                "needed"
            )
        return answers

    def agree(self, agreed: Mapping[str, Any], ids: Mapping[str, int], run: str) -> dict[str, str]:
        """Send the nodes what all agreed on, and the method; return what each client starts from.

        Raises:
            TooFewNodes: a node cannot take part, or would run something else.
        """
        content = json.dumps(agreed).encode()
        names = {number: name for name, number in ids.items()}
        starts = {}
        for number, found in self._sent("query.agree", dict.fromkeys(names, content)):
            if isinstance(found, Refused):
                raise TooFewNodes(f"client '{names[number]}' cannot take part: {found}")
            said = json.loads(found)
            if said["run"] != run:
                raise TooFewNodes(
                    f"client '{names[number]}' would run another method, model or version of "
                    "hierfl than this server: see that both have the same code, and that the "
                    "nodes' app names no other method"
                )
            starts[names[number]] = str(said["start"])
        if missing := sorted(ids.keys() - starts.keys()):
            raise TooFewNodes(f"client '{missing[0]}' did not answer within {self.timeout:g} s")
        return starts

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


# ------------------------------------------------------------ a fit
@dataclass(frozen=True, eq=False)
class Server:
    """The server of fits over some nodes.

    Args:
        nodes: as the server reaches them.
        count: how many nodes a fit waits for before its first round.
        fewest: clients that a round needs.
    """

    nodes: Nodes
    count: int
    fewest: int = 1

    def fit(
        self, call: FitCall, *, context: Context | None = None, send_recipe: bool = False
    ) -> FitOverNodes:
        """Let the nodes introduce themselves, agree, and go through the rounds.

        Args:
            call: what to fit.
            context: of the server app, for secure aggregation. Default None: single updates.
            send_recipe: send the nodes the recipe of a named method; that of a chosen one is always
                sent.

        Raises:
            TooFewNodes: nodes are missing, or cannot take part.
            ValueError: as `hierfl.nodes.fit_nodes`.
        """
        there, schema = self.nodes.there(self.count), b""
        if call.lacks_schema:
            call = self.nodes.with_schema(call, there)
            formula: Any = call.method
            schema = formula.agreed.json().encode()
        found = self.nodes.introductions(there, self.count, schema)
        agreement = Agreement.between(list(found.values()))
        ids = {one.client: number for number, one in found.items()}
        method, rounds, why, read = decided(call, agreement)
        everything = {
            "agreement": agreement.as_json(),
            "method": describe(method) if send_recipe or why is not None else None,
            "seed": call.seed,
        }
        starts = self.nodes.agree(everything, ids, run_name(method, agreement, call.seed))

        def summed(contents: Mapping[str, bytes], size: int) -> Summed:
            assert context is not None
            return sum_of(self.nodes.grid, context, contents, ids, size, self.nodes.timeout)

        return fit_nodes(
            method,
            agreement,
            lambda contents: self.nodes.ask(contents, ids),
            rounds=rounds,
            seed=call.seed,
            cohort=call.cohort,
            fewest=self.fewest,
            starts=starts,
            checkpoint=call.checkpoint,
            resume=call.resume,
            chosen=why,
            read=read,
            ask_sum=None if context is None else summed,
        )
