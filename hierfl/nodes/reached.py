"""A fit over nodes that any transport reaches: what a server asks before the rounds, and in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hierfl.core.arguments import spelled
from hierfl.core.user_warnings import warn
from hierfl.engine.client_store import CheckpointError
from hierfl.engine.exact_sums import AskSum
from hierfl.method import Method
from hierfl.nodes.agreement import Agreement, Introduction, of_one_name
from hierfl.nodes.answers import end_run
from hierfl.nodes.choosing import Decided, FitCall
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.gathering import check_enough, fit_introduced, join_introduced, reasons
from hierfl.nodes.messages import SILENT, Answer, Ask, Refused, last_counted, read_json, read_typed
from hierfl.nodes.node import run_name
from hierfl.nodes.run import LONGEST, TooFewNodes
from hierfl.program.recipes import describe
from hierfl.program.sites import Family, Guide, Model
from hierfl.runs import checkpoint as state
from hierfl.runs import saved
from hierfl.runs.load import load as load_fit
from hierfl.runs.records import read_json as read_record
from hierfl.runs.run_folder import NODES, checkpoints

ANOTHER = (
    "it would run another method, model or version of hierfl than this server: see that both have "
    "the same code, and that the nodes' app names no other method"
)
# (kind of request, node -> content) -> what nodes answer, or why they do not
Send = Callable[[str, Mapping[Any, bytes]], Iterable[Answer]]


@dataclass(frozen=True, eq=False)
class Reached:
    """Nodes by their keys, and `send`, which takes contents of a kind to them and brings back answers.

    `forget` removes what a transport keeps of a node's answers; `send_end` is False where each message
    takes a person, or a container.
    """

    send: Send
    nodes: Sequence[Any]
    fewest: int = 1
    silent: str = SILENT
    send_recipe: bool = True
    ask_sum: Callable[[Mapping[str, Any]], AskSum] | None = None
    forget: Callable[[Any], None] = lambda node: None
    send_end: bool = True

    def reached(self, call: FitCall) -> Reached:
        """Return the nodes of a call, as every transport does: these."""
        return self

    def fit_over(self, call: FitCall) -> FitOverNodes:
        """Fit over the nodes."""
        nodes, schema, absent, told = list(self.nodes), b"", dict[Any, str](), dict[Any, Any]()
        if call.lacks_schema:
            call, absent, told = self._with_schema(call)
            nodes = [node for node in nodes if node not in absent]
            formula: Any = call.method
            schema = formula.agreed.json().encode()

        def agree(agreement: Agreement, run: Decided, ids: Mapping[str, Any]) -> Any:
            sends = self.send_recipe or run.why is not None
            recipe = describe(run.method) if sends else None
            every = {"agreement": asdict(agreement), "method": recipe, "seed": call.seed}
            return self._agree(every, ids, run_name(run.method, agreement, call.seed))

        ask = partial(_Asks, self)
        introduced, silent = self._introductions(nodes, schema, told)
        absent = {
            f"node {of}" if str(of).isdigit() else of: w for of, w in (absent | silent).items()
        }
        if call.joins is not None:
            fit = join_introduced(call.joins, introduced, self.fewest, agree, ask, absent)
        else:
            fit = fit_introduced(call, introduced, self.fewest, agree, ask, self.ask_sum, absent)
        if not self.send_end:
            return fit
        # the clients of the last round get the state that the run has ended with
        counted, last = last_counted(fit.federation, fit.progress.history), fit.progress.round - 1
        return replace(fit, ended=end_run(fit, [c for c, at in counted.items() if at == last]))

    def ask_about_rows(
        self, formula: Any, ask: Any, columns: Iterable[str], by: str | None, least: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask the nodes about their rows; `hierfl.describe` and `hierfl.kaplan_meier` call it."""
        # few runs need it
        from hierfl.nodes.describing import DescriptionRequest, answers_by_client

        question = DescriptionRequest(ask, least, by or "", tuple(columns))
        answers, left_out = self._answers("describe", self.nodes, question.content())
        by_client, unlike = answers_by_client(answers, question)
        left_out |= unlike
        check_enough(by_client, left_out, self.fewest, "describe their rows")
        return by_client, {str(node): why for node, why in left_out.items()}

    def asking(self, clients: Iterable[str]) -> Ask:
        """Return how the nodes of some clients are asked after a run."""
        introduced, _ = self._introductions(self.nodes, b"", {})
        names = set(clients)
        ids = {of.client: node for node, of in introduced.items() if of.client in names}
        check_enough(ids, {}, 1, "have a client of the fit")
        return _Asks(self, ids)

    def _with_schema(self, call: FitCall) -> tuple[FitCall, dict[Any, str], dict[Any, Any]]:
        """Return the call with the schema of its formula, why some nodes have not agreed, and others' clients."""
        # pandas, which most models do not need
        from hierfl.nodes.agreed_schema import UNANSWERED, agreed_over

        silent: dict[Any, str] = {}

        def send(question: bytes) -> dict[Any, bytes]:
            there = [node for node in self.nodes if node not in silent]
            answers, refused = self._answers("schema", there, question)
            check_enough(answers, refused, self.fewest, "answer questions about the schema")
            silent.update(refused)
            return answers

        formula: Any = call.method
        formula, left_out, told = agreed_over(formula, send)
        there = [node for node in self.nodes if node not in silent.keys() | left_out.keys()]
        check_enough(there, left_out, self.fewest, "agree on a schema")
        # a node that was left out may refuse what the others have agreed on then
        later = {of: w for of, w in silent.items() if left_out.get(of, UNANSWERED) == UNANSWERED}
        return replace(call, method=formula), {**left_out, **later}, told

    def _introductions(
        self, nodes: Sequence[Any], schema: bytes, told: Mapping[Any, tuple[str, int | None]]
    ) -> tuple[dict[Any, Introduction], dict[Any, str]]:
        """Return how nodes introduce their clients, by a formula's schema, and why others do not; refuse too few.

        A node's client and its rows are those that it has `told` of for the schema.
        """
        introduced: dict[Any, Introduction] = {}
        answers, left_out = self._answers("introduce", nodes, schema)
        for node, content in answers.items():
            try:
                of = read_typed(Introduction, content, "introduction")
                name, rows = told.get(node, (of.client, None))
                if of.client != name or of.rows != (rows or of.rows):
                    what = f"client '{of.client}' with {of.rows} rows"
                    raise Refused(f"it introduces {what}, after answers of '{name}' with {rows}")
                introduced[node] = of
            except Refused as error:
                left_out[node] = str(error)
        left_out |= of_one_name({node: of.client for node, of in introduced.items()})
        introduced = {node: of for node, of in introduced.items() if node not in left_out}
        check_enough(introduced, left_out, self.fewest, "introduce a client")
        for of in (of for of in introduced.values() if of.moved):
            who, names = f"client '{of.client}' fits its rows with", ", ".join(of.moved)[:LONGEST]
            what = "moved to the nearest others: too few rows have them (min_count)"
            warn(f"{who} values of {names} {what}")
        return introduced, left_out

    def _answers(
        self, kind: str, nodes: Sequence[Any], content: bytes
    ) -> tuple[dict[Any, bytes], dict[Any, str]]:
        """Return what nodes answer before the rounds, and why others do not."""
        answers: dict[Any, bytes] = {}
        refused = dict.fromkeys(nodes, self.silent)
        for answer in self.send(kind, dict.fromkeys(nodes, content)):
            if answer.client in refused and answer.content is not None:
                answers[answer.client] = answer.content
            elif answer.client in refused:
                refused[answer.client] = answer.reason
        return answers, {node: why for node, why in refused.items() if node not in answers}

    def _agree(
        self, agreed: Mapping[str, Any], ids: Mapping[str, Any], run: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Send nodes what all agreed on, and the method; return what each client starts from, or why not."""
        answers, refused = self._answers("agree", list(ids.values()), json.dumps(agreed).encode())
        others = {name: refused[node] for name, node in ids.items() if node in refused}
        starts = {name: _start(answers[node], run) for name, node in ids.items() if node in answers}
        others |= {name: ANOTHER for name, start in starts.items() if not start}
        if 2 * list(others.values()).count(ANOTHER) >= len(ids):  # it is the server that differs
            raise TooFewNodes(reasons(others))
        return {name: start for name, start in starts.items() if start}, others


@dataclass(frozen=True, eq=False)
class _Asks:
    """Asks clients, client -> node, by a transport, which can forget what one of them answered."""

    reached: Reached
    ids: Mapping[str, Any]

    def __call__(self, contents: Mapping[str, bytes]) -> Iterator[Answer]:
        """Ask clients for a round."""
        names = {node: name for name, node in self.ids.items()}
        by_node = {self.ids[name]: of for name, of in contents.items() if name in self.ids}
        for answer in self.reached.send("round", by_node):
            if answer.client in names:
                yield answer._replace(client=names[answer.client])

    def forget(self, client: str) -> None:
        """Remove what the transport keeps of a client's answers."""
        if client in self.ids:
            self.reached.forget(self.ids[client])


def _start(content: bytes, run: str) -> str:
    """Return what a client says that it starts from; "": it would run something else."""
    try:
        start = read_json(content)
        return str(start["start"])[:100] if start["run"] == run else ""
    except (Refused, KeyError, TypeError, IndexError):
        return ""


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
    check_fewest(fewest, len(names))

    def send(kind: str, contents: Mapping[Any, bytes]) -> Iterator[Answer]:
        requests = {name: write_request(kind, content) for name, content in contents.items()}
        for answer in ask(requests):
            if answer.content is None:
                yield answer._replace(reason=answer.reason or SILENT)
            elif answer.client in requests:  # another is nobody's answer
                try:
                    content = read_answer(requests[answer.client], answer.content)
                    yield Answer(answer.client, content)
                except Refused as error:
                    yield Answer(answer.client, None, str(error))

    return Reached(send, names, fewest)


def check_fewest(fewest: int, count: int) -> None:
    """Refuse a least number of clients that is none of `count` nodes."""
    if not 1 <= fewest <= count:
        raise ValueError(f"fewest is {fewest}: it must be 1 to {count}")


@spelled
def load(
    folder: str | Path,
    nodes: Any = None,
    *,
    method: Method | None = None,
    model: Model | None = None,
    guide: Guide | Family | None = None,
) -> FitOverNodes:
    """Read a fit that `FitOverNodes.save` has written.

    Args:
        folder: of the fit.
        nodes: those of the fit, as for `hierfl.nodes.fit`, to ask about their clients. Default None:
            the fit answers what the server has.
        method: as in `hierfl.load`.
        model: as in `hierfl.load`.
        guide: as in `hierfl.load`.

    Raises:
        CheckpointError: the folder holds no undamaged fit over nodes.
        CannotRemake: the method cannot be built again, or the model or guide is another one.
        TooFewNodes: no node introduces a client of the fit.
    """
    fit = load_fit(folder, method=method, model=model, guide=guide)
    newest, record = saved.newest_record(checkpoints(Path(folder)))
    if NODES not in record.hashes or not state.is_whole(newest / NODES, record.hashes[NODES]):
        raise CheckpointError(f"'{folder}' holds no fit over nodes: read it by hierfl.load")
    names = read_record(newest / NODES)
    ask: Ask = _nobody
    if nodes is not None:
        asked: Any = fit.method if fit.chosen is None else fit.method.model
        ask = nodes.reached(FitCall(asked)).asking(fit.clients)
    run = names["run"], ask, names["joined"]
    return FitOverNodes(fit.method, fit.federation, fit.progress, fit.rounds, *run)


def _nobody(contents: Any) -> Any:
    raise ValueError(
        "the fit was loaded without its nodes, of which this is asked: hierfl.nodes.load(folder, nodes)"
    )
