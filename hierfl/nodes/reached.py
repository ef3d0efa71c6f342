"""A fit over nodes that any transport reaches: what a server asks before the rounds, and in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hierfl.core.arguments import spelled
from hierfl.nodes.after_rounds import end_run
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Answer, Ask, last_counted
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import Decided
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.gathering import check_enough, fit_introduced
from hierfl.nodes.messages import Refused, read_json
from hierfl.nodes.named_answers import of_one_name
from hierfl.nodes.node import run_name
from hierfl.nodes.run import SILENT, TooFewNodes
from hierfl.nodes.together import AskSum
from hierfl.program.recipes import describe

ANOTHER = (
    "it would run another method, model or version of hierfl than this server: see that both have "
    "the same code, and that the nodes' app names no other method"
)
# (kind of request, node -> content) -> node, and what it answers or why it does not
Send = Callable[[str, Mapping[Any, bytes]], Iterable[tuple[Any, bytes | Refused]]]


@dataclass(frozen=True, eq=False)
class Reached:
    """Nodes by their keys, and `send`, which takes contents of a kind to them and brings back answers."""

    send: Send
    nodes: Sequence[Any]
    fewest: int = 1
    silent: str = SILENT
    send_recipe: bool = True
    ask_sum: Callable[[Mapping[str, Any]], AskSum] | None = None
    forget: Callable[[Any], None] | None = (
        None  # removes what a transport keeps of a node's answers
    )
    send_end: bool = True  # False: where each message takes a person, or a container

    def fit_over(self, call: FitCall) -> FitOverNodes:
        """Fit over the nodes; `hierfl.nodes.fit` calls it."""
        nodes, schema, absent = list(self.nodes), b"", dict[Any, str]()
        if call.lacks_schema:
            call, absent = self._with_schema(call, nodes)
            nodes = [node for node in nodes if node not in absent]
            formula: Any = call.method
            schema = formula.agreed.json().encode()

        def agree(agreement: Agreement, run: Decided, ids: Mapping[str, Any]) -> Any:
            sends = self.send_recipe or run.why is not None
            recipe = describe(run.method) if sends else None
            every = {"agreement": asdict(agreement), "method": recipe, "seed": call.seed}
            return self._agree(every, ids, run_name(run.method, agreement, call.seed))

        def ask(ids: Mapping[str, Any]) -> Ask:
            return _Asks(self, ids)

        found, silent = self._introductions(nodes, schema)
        absent |= silent
        named = {f"node {of}" if str(of).isdigit() else of: why for of, why in absent.items()}
        if call.joins is not None:
            from hierfl.nodes.joining import join_introduced  # few runs need it

            joined = join_introduced(call.joins, found, agree, ask, named)
            return self._ended(joined)
        fit = fit_introduced(call, found, self.fewest, agree, ask, self.ask_sum, named)
        return self._ended(fit)

    def _ended(self, fit: FitOverNodes) -> FitOverNodes:
        """Send the clients of the last round the state that the run has ended with."""
        if not self.send_end:
            return fit
        counted, last = last_counted(fit.federation, fit.progress.history), fit.progress.round - 1
        return replace(fit, ended=end_run(fit, [c for c, at in counted.items() if at == last]))

    def ask_about_rows(
        self, formula: Any, ask: Any, columns: Iterable[str], by: str | None, least: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask the nodes about their rows; `hierfl.describe` and `hierfl.kaplan_meier` call it."""
        from hierfl.nodes.describing import (
            DescriptionRequest,
            answers_by_client,
        )  # few runs need it

        question = DescriptionRequest(ask, least, by or "", tuple(columns))
        answers, refused = self._answers("describe", list(self.nodes), question.content())
        found, odd = answers_by_client(answers, question)
        check_enough(found, refused | odd, self.fewest, "describe their rows")
        return found, {str(node): why for node, why in (refused | odd).items()}

    def asking(self, call: FitCall, clients: Iterable[str]) -> Ask:
        """Return how the nodes of some clients are asked after a run; `hierfl.nodes.load` calls it."""
        found, _ = self._introductions(list(self.nodes), b"")
        known = set(clients)
        ids = {one.client: node for node, one in found.items() if one.client in known}
        check_enough(ids, {}, 1, "have a client of the fit")
        return _Asks(self, ids)

    def _with_schema(self, call: FitCall, nodes: list[Any]) -> tuple[FitCall, dict[Any, str]]:
        """Return the call with the schema of its formula, and why some nodes have not agreed on it."""
        # here: pandas, which most models do not need
        from hierfl.formulas.formula import Formula
        from hierfl.nodes.agreed_schema import agreed_over

        assert isinstance(call.method, Formula)
        absent: dict[Any, str] = {}

        def send(asked: bytes) -> dict[Any, bytes]:
            there = [node for node in nodes if node not in absent]
            answers, refused = self._answers("schema", there, asked)
            check_enough(answers, refused, self.fewest, "answer questions about the schema")
            absent.update(refused)
            return answers

        formula, left_out = agreed_over(call.method, send)
        there = [node for node in nodes if node not in absent.keys() | left_out.keys()]
        check_enough(there, left_out, self.fewest, "agree on a schema")
        return replace(call, method=formula), {**left_out, **absent}

    def _introductions(
        self, nodes: list[Any], schema: bytes
    ) -> tuple[dict[Any, Introduction], dict[Any, str]]:
        """Return how nodes introduce their clients, by a formula's schema, and why others do not; refuse too few."""
        found: dict[Any, Introduction] = {}
        answers, refused = self._answers("introduce", nodes, schema)
        for node, content in answers.items():
            try:
                found[node] = Introduction.from_json(read_json(content))
            except Refused as error:
                refused[node] = str(error)
        refused |= (doubled := of_one_name({n: of.client for n, of in found.items()}))
        found = {node: said for node, said in found.items() if node not in doubled}
        check_enough(found, refused, self.fewest, "introduce a client")
        return found, refused

    def _answers(
        self, kind: str, nodes: Sequence[Any], content: bytes
    ) -> tuple[dict[Any, bytes], dict[Any, str]]:
        """Return what nodes answer before the rounds, and why others do not."""
        answers: dict[Any, bytes] = {}
        refused = dict.fromkeys(nodes, self.silent)
        for node, found in self.send(kind, dict.fromkeys(nodes, content)):
            if node in nodes and isinstance(found, Refused):
                refused[node] = str(found)
            elif node in nodes and isinstance(found, bytes):
                answers[node] = found
        return answers, {n: why for n, why in refused.items() if n not in answers}

    def _agree(
        self, agreed: Mapping[str, Any], ids: Mapping[str, Any], run: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Send nodes what all agreed on, and the method; return what each client starts from, or why not."""
        starts: dict[str, str] = {}
        others: dict[str, str] = {}
        answers, refused = self._answers("agree", list(ids.values()), json.dumps(agreed).encode())
        for name, node in ids.items():
            if node not in answers:
                others[name] = refused[node]
            elif (start := _start(answers[node], run)) is None:
                others[name] = ANOTHER
            else:
                starts[name] = start
        if 2 * list(others.values()).count(ANOTHER) >= len(ids):  # it is the server that differs
            raise TooFewNodes("; ".join(f"client '{name}': {why}" for name, why in others.items()))
        return starts, others


@dataclass(frozen=True, eq=False)
class _Asks:
    """Asks clients, client -> node, by a transport, which can forget what one of them answered."""

    reached: Reached
    ids: Mapping[str, Any]

    def __call__(self, contents: Mapping[str, bytes]) -> Iterator[Answer]:
        """Ask clients for a round."""
        names = {node: name for name, node in self.ids.items()}
        asked = {self.ids[name]: of for name, of in contents.items() if name in self.ids}
        for node, content in self.reached.send("round", asked):
            if node in names and isinstance(content, Refused):
                yield Answer(names[node], None, str(content))
            elif node in names and isinstance(content, bytes):
                yield Answer(names[node], content)

    def forget(self, client: str) -> None:
        """Remove what the transport keeps of a client's answers."""
        if self.reached.forget is not None and client in self.ids:
            self.reached.forget(self.ids[client])


def _start(content: bytes, run: str) -> str | None:
    """Return what a client says that it starts from; None: it would run something else."""
    try:
        said = read_json(content)
        return str(said["start"])[:100] if said["run"] == run else None
    except (Refused, KeyError, TypeError, IndexError):
        return None


@spelled
def over(ask: Ask, nodes: Iterable[str], *, fewest: int = 1) -> Reached:
    """Return the nodes that a transport of yours reaches, for `hierfl.nodes.fit`.

    At each node `hierfl.nodes.station(...).answer` makes the bytes of an answer out of those of a
    request. Requests hold no row; answers are checked here, as over any transport.

    Args:
        ask: hands each node its request, node -> bytes, and yields `Answer(node, bytes)` as they
            come back, late, twice or in any order; or `Answer(node, None, reason)`.
        nodes: names of the nodes, such as addresses or folders; their clients' names may be others.
        fewest: clients that a run and each of its rounds need; nodes that fail are left out, with a
            warning, while so many remain.

    Raises:
        ValueError: two nodes have the same name, or `fewest` is below 1 or above their number.
    """
    names = [nodes] if isinstance(nodes, str) else list(nodes)
    if len(set(names)) < len(names):
        raise ValueError(f"nodes are {names}: name each once")
    if not 1 <= fewest <= len(names):
        raise ValueError(f"fewest is {fewest}: it must be 1 to {len(names)}")

    def send(kind: str, contents: Mapping[Any, bytes]) -> Iterator[tuple[Any, bytes | Refused]]:
        requests = {name: write_request(kind, content) for name, content in contents.items()}
        for one in ask(requests):
            try:
                if one.content is None:
                    raise Refused(one.reason or SILENT)
                if one.client in requests:  # another is nobody's answer
                    yield one.client, read_answer(requests[one.client], one.content)
            except Refused as error:
                yield one.client, error

    return Reached(send, names, fewest)
