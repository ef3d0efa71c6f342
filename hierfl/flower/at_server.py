"""The server's side of a run on Flower: what it asks nodes before and in the rounds."""

from __future__ import annotations

import json
import time
import warnings
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
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.node import run_name
from hierfl.nodes.run import TooFewNodes, fit_nodes
from hierfl.nodes.together import Summed
from hierfl.program.recipes import describe

ONCE_MORE = 1.0  # seconds between two looks for nodes
# seconds between two looks for answers: at first, at most, and by how much they grow
SOON, LATER, SLOWER = 0.05, 1.0, 1.2


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

    def introductions(
        self, ids: list[int], count: int, fewest: int, schema: bytes
    ) -> dict[int, Introduction]:
        """Return how nodes introduce their clients, given a formula's schema; too few are refused."""
        found, answers = {}, self._answers("query.introduce", ids, count, schema)
        for number, content in answers.items():
            try:
                found[number] = Introduction.from_json(read_json(content))
            except Refused as error:
                _warn_of(f"node {number}", str(error))
        if len(found) < fewest:
            raise TooFewNodes(f"{len(found)} nodes introduced a client, and {fewest} are needed")
        return found

    def with_schema(self, call: FitCall, ids: list[int]) -> FitCall:
        """Return the call once the nodes have agreed on the schema of its formula."""
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
        refused: dict[int, str] = {}
        for number, found in self._sent(kind, dict.fromkeys(ids, content)):
            if number in ids and isinstance(found, Refused):
                refused[number] = str(found)
            elif number in ids and isinstance(found, bytes):
                answers[number] = found
        for number, why in refused.items():
            if len(answers) < count:
                raise TooFewNodes(f"node {number} cannot introduce its client: {why}")
            _warn_of(f"node {number}", why)
        if len(answers) < count:
            raise TooFewNodes(
                f"{len(answers)} of {len(ids)} nodes introduced their clients, and {count} are "
                "needed"
            )
        return answers

    def agree(self, agreed: Mapping[str, Any], ids: Mapping[str, int], run: str) -> dict[str, str]:
        """Send the nodes what all agreed on, and the method; return what each client starts from."""
        names, starts = {number: name for name, number in ids.items()}, {}
        others: dict[str, str] = {}
        content = json.dumps(agreed).encode()
        for number, found in self._sent("query.agree", dict.fromkeys(names, content)):
            name = names.get(number, "")
            if name and isinstance(found, Refused):
                raise TooFewNodes(f"client '{name}' cannot take part: {found}")
            if name and isinstance(found, bytes):
                starts[name], others = _start(name, found, run, others)
        if 2 * len(others) >= len(ids):
            raise TooFewNodes("; ".join(others.values())[:2000])
        for name, why in others.items():
            _warn_of(f"client '{name}'", why)
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


def _start(name: str, content: bytes, run: str, others: dict[str, str]) -> Any:
    """Return what a client says that it starts from, and `others` with it if that is another run."""
    try:
        said = read_json(content)
        if said["run"] == run:
            return str(said["start"])[:100], others
    except (Refused, KeyError, TypeError, IndexError):
        pass
    why = (
        f"client '{name}' would run another method, model or version of hierfl than this server: "
        "see that both have the same code, and that the nodes' app names no other method"
    )
    return "another run", {**others, name: why}


def _warn_of(who: str, why: str) -> None:
    warnings.warn(f"{who} is left out: {why[:500]}", stacklevel=4)


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
            call = self.nodes.with_schema(call, there)
            formula: Any = call.method
            schema = formula.agreed.json().encode()
        found = self.nodes.introductions(there, self.count, self.fewest, schema)
        agreement, others = Agreement.of_most(list(found.values()))
        for client, differs in others.items():
            _warn_of(f"client '{client}'", differs)
        ids = {o.client: n for n, o in found.items() if o.client in agreement.names}
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
