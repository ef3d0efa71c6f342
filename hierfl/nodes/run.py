"""The server's side of a run over nodes: rounds without rows, whose answers come in any order, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hierfl.core.process import one_at_a_time
from hierfl.core.trees import nbytes, tree_map
from hierfl.core.user_warnings import warn
from hierfl.data.absent import FILLS
from hierfl.data.clients import ClientData
from hierfl.engine import exact_sums
from hierfl.engine.chunks import (
    ClientError,
    Done,
    LeftOutClient,
    Task,
    client_round,
    counted,
    once_each,
)
from hierfl.engine.federation import Federation, Settings, federate
from hierfl.engine.rounds import begin, with_absent
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Method, Up
from hierfl.nodes import updates
from hierfl.nodes.agreement import Agreement, few_made_up
from hierfl.nodes.choosing import ReadAlone
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.messages import (
    COUNTED,
    SILENT,
    Answer,
    Ask,
    Refused,
    RoundRequest,
    check_about,
    from_bytes,
    last_counted,
    like,
    mail_of,
    to_bytes,
)
from hierfl.nodes.node import run_name
from hierfl.program.read import read as read_program
from hierfl.runs import checkpoint as state
from hierfl.runs.call import planned_of
from hierfl.runs.one_run import resumed
from hierfl.runs.records import about
from hierfl.runs.run_folder import held
from hierfl.runs.saved import start_of

AT_ONCE = 256  # answers that are in memory together, at most; sums of the others are kept alone
AT_ONCE_BYTES = 1 << 26  # of these answers together, but for
AT_LEAST = 16  # answers
LONGEST = 500  # characters of a reason


class TooFewNodes(ClientError):
    """Fewer nodes answered than a round needs; the run can be continued from its last checkpoint.

    `missing` has the clients without which the run could begin again, since its method needs every
    one: client -> why it is missing.
    """

    def __init__(self, message: str, missing: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, eq=False)
class Nodes:
    """A federation whose rows are elsewhere; `few` has made-up rows, `counted` each client's last counted round."""

    method: Method
    federation: Federation
    few: Federation
    run: str
    ask: Ask
    fewest: int
    counted: dict[str, int]
    ask_sum: exact_sums.AskSum | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    latest: updates.LatestRound = field(default_factory=updates.LatestRound)

    def work(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """Run the tasks of a round at the nodes, as one: clients of many rows need none of their own here."""
        every = list(tasks)
        own = tree_map(lambda *trees: torch.cat(trees), *(task.own for task in every))
        task = every[0]._replace(own=own, ids=torch.cat([task.ids for task in every]))
        names = self.federation.data.names
        places = {names[int(i)]: place for place, i in enumerate(task.ids)}
        contents = {
            name: to_bytes(
                {"message": task.message, "mail": mail_of(self.federation.client, own, place)},
                asdict(RoundRequest(self.run, task.round, self.counted.get(name, -1))),
            )
            for name, place in places.items()
            if name not in self.left_out
        }
        if self.ask_sum is None:
            yield from self._worked(task, places, contents)
        else:
            yield self._summed(self.ask_sum, task, places, contents)

    def _worked(
        self, task: Task, places: Mapping[str, int], contents: Mapping[str, bytes]
    ) -> Iterator[Done]:
        """Ask nodes for the updates of a round, and sum these as they come in."""
        template = self._template(task)
        at_once = min(AT_ONCE, max(AT_LEAST, AT_ONCE_BYTES // max(1, nbytes(template))))
        ups: dict[int, Up] = {}
        there: set[int] = set()
        reasons: dict[str, str] = {}
        for answer in self.ask(contents):
            place = places.get(answer.client)
            if place is None or place in there:  # nobody asked it, or it has answered already
                continue
            try:
                ups[place] = self._read(answer, task, template, self._rows(task, place))
            except Exception as error:  # whatever crafted bytes raise
                why = str(error) if isinstance(error, Refused) else type(error).__name__
                reasons.setdefault(answer.client, why[:LONGEST])
                continue
            there.add(place)
            if len(ups) == at_once:
                there -= self._drop_unlike(task, ups, reasons)
                yield self._counted(task, ups, ())
                ups = {}
        there -= self._drop_unlike(task, ups, reasons)
        self.latest.ups = ups if len(ups) == len(there) else {}  # the others' are summed
        self.latest.ids = task.ids
        self.latest.summed = lambda some: self._counted(task, some, ()).sums
        yield self._counted(task, ups, self._ended(task, places, there, reasons))

    def _drop_unlike(self, task: Task, ups: dict[int, Up], reasons: dict[str, str]) -> set[int]:
        """Take out updates that are unlike all others, and return their places."""
        unlike = updates.unlike_others(ups, {place: self._rows(task, place) for place in ups})
        for place, why in unlike.items():
            del ups[place]
            reasons[self.federation.data.names[int(task.ids[place])]] = why
        return set(unlike)

    def _rows(self, task: Task, place: int) -> int:
        return int(self.federation.data.counts[task.ids[place]])

    def _counted(
        self, task: Task, ups: Mapping[int, Up], left_out: tuple[LeftOutClient, ...]
    ) -> Done:
        """Return the sum of some clients' updates, by their places."""
        places = torch.tensor(sorted(ups), dtype=torch.long)
        own, ids = tree_map(lambda v: v[places], task.own), task.ids[places]
        if not ups:
            return Done({}, own, ids, {}, left_out)
        up = tree_map(lambda *trees: torch.cat(trees), *(ups[int(k)] for k in places))
        return counted(self.federation, task._replace(ids=ids), up, own, left_out)

    def _summed(
        self,
        ask_sum: exact_sums.AskSum,
        task: Task,
        places: Mapping[str, int],
        contents: Mapping[str, bytes],
    ) -> Done:
        """Run the tasks of a round at the nodes, of which the server learns the sum alone."""
        template = self._template(task)
        exact_sums.check_sums(self.method.name, template)
        answer = ask_sum(contents, exact_sums.size_of(template))
        there = {places[name] for name in answer.clients}
        left_out = self._ended(task, places, there, answer.reasons)
        at = torch.tensor(sorted(there))
        own, sent = tree_map(lambda v: v[at], task.own), nbytes(template) * len(at)
        return Done(
            exact_sums.sums_of(answer.parts, template), own, task.ids[at], {}, left_out, sent
        )

    def _ended(
        self, task: Task, places: Mapping[str, int], there: set[int], reasons: Mapping[str, str]
    ) -> tuple[LeftOutClient, ...]:
        """Count the clients that answered, unless they are too few, and return the others."""
        left_out = tuple(
            LeftOutClient(int(task.ids[place]), reasons.get(name, self.left_out.get(name, SILENT)))
            for name, place in places.items()
            if place not in there
        )
        names = self.federation.data.names
        who = "; ".join(f"'{names[of.client]}': {of.reason}" for of in left_out[:5])
        if left_out and self.method.everyone:
            again = self.federation.client.row_noise is None  # of which each run spends the budget
            raise TooFewNodes(
                f"round {task.round}: {self.method.name} needs every client in each round, and "
                f"{len(left_out)} of {len(task.ids)} are missing ({who}): fix them and continue "
                "the run, or begin one without them",
                {names[of.client]: of.reason for of in left_out if again},
            )
        if len(there) < self.fewest:
            raise TooFewNodes(
                f"round {task.round}: {len(there)} clients answered, and {self.fewest} are needed "
                f"({who}): fix them, and continue the run"
            )
        self.counted.update({name: task.round for name, place in places.items() if place in there})
        return left_out

    def _read(self, answer: Answer, task: Task, template: Up, rows: int) -> Up:
        """Return what a client sends, checked against what it should look like."""
        if answer.content is None:
            raise Refused(answer.reason or SILENT)
        tree, about = from_bytes(answer.content, most=nbytes(template))
        check_about(about, {"run": self.run, "client": answer.client, "round": task.round})
        up: Up = like(tree, template)
        updates.check_update(self.federation.server, self.federation.client, task.message, up, rows)
        return up

    def _template(self, task: Task) -> Up:
        """Return an update of the first client after one step of each kind on made-up rows, for shapes and dtypes."""
        own = tree_map(lambda v: v[:1], task.own)
        phases = once_each(self.few.client.phases)
        up, _ = client_round(self.few, phases, task.message, own, task.ids[:1], task.round)
        return up

    def name_left_out(self, history: Sequence[dict[str, Any]]) -> None:
        """Write into the last round's record which client was left out of it when all had answered."""
        if self.latest.left_out is None:
            return
        record = history[-1]
        name = self.federation.data.names[self.latest.left_out]
        who = f"round {record['round']}: client '{name}' is left out"
        if self.method.everyone:
            why = f"{self.method.name} needs every client: {updates.WHY}"
            raise TooFewNodes(f"{who}, and {why}", {name: updates.WHY})
        warn(f"{who}: {updates.WHY}")
        record["clients"] -= 1
        record["left_out"] = [*record["left_out"], {"client": name, "reason": updates.WHY}]
        earlier = last_counted(self.federation, history[:-1])
        self.counted.pop(name)
        self.counted.update({name: earlier[name]} if name in earlier else {})

    def keep_counted(self, history: Sequence[dict[str, Any]]) -> None:
        """Write into the last record who was counted when, where the seed of cohorts is not kept."""
        if self.federation.server.cohort_seed is not None:
            history[-1][COUNTED] = [{"client": n, "round": at} for n, at in self.counted.items()]


@one_at_a_time
def fit_nodes(
    method: Method,
    agreement: Agreement,
    ask: Ask,
    *,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    fewest: int = 1,
    starts: Mapping[str, str] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    chosen: str | None = None,
    read: ReadAlone | None = None,
    ask_sum: exact_sums.AskSum | None = None,
    absent: Mapping[str, str] | None = None,
) -> FitOverNodes:
    """Fit a method to clients whose rows are at nodes, which agreed on it.

    `starts` is what they start from; `absent` clients take no part, for a reason.
    """
    planned = planned_of(method, rounds)
    everyone, few, rowless = without_rows(method, agreement, seed, cohort, read)
    left_out = other_starts(everyone, starts or {})
    run = run_name(method, agreement, seed)
    folder = None if checkpoint is None else Path(checkpoint)
    who = about(method, few, planned) if folder is not None else {}
    with nullcontext() if folder is None else held(folder):
        where = resumed(folder, everyone, who, resume) if folder else None
        where = replace(where or begin(everyone), chosen=chosen)
        counted = last_counted(everyone, where.history)
        nodes = Nodes(method, everyone, few, run, ask, fewest, counted, ask_sum, left_out)
        guarded = updates.without_one(everyone, method.name, nodes.latest)
        with closing(run_rounds(guarded, where, planned, nodes.work)) as rounds_left:
            for where in rounds_left:
                nodes.name_left_out(where.history)
                nodes.keep_counted(where.history)
                where.history[-1].update(with_absent(where.history[-1], absent or {}))
                if folder is not None:
                    state.save(folder, where, who)
    return FitOverNodes(method, rowless, where, planned, run, ask)


def without_rows(
    method: Method,
    agreement: Agreement,
    seed: int,
    cohort: int | float | None,
    read: ReadAlone | None,
) -> tuple[Federation, Federation, Federation]:
    """Return the federation with values in place of the rows, with a few made-up rows, and without rows."""
    settings = Settings(
        chunk=len(agreement.names), on_client_error="raise" if method.everyone else "skip"
    )

    def made(data: ClientData) -> Federation:
        program = None if read is None else read.program
        if program is None:
            program = agreement.agreed(read_program(method.model, method.guide, data, seed=seed))
        how: Any = {"seed": seed, "cohort": cohort, "settings": settings}
        return federate(method, data, program=program, **how)

    why = "the program cannot be read without rows ({}): it may read their values in its likelihood alone"
    everyone, fills = agreement.tried(made, why, FILLS if read is None else [read.fills])
    none = agreement.absent_rows(fills)
    return everyone, replace(everyone, data=few_made_up(none)), replace(everyone, data=none)


def other_starts(federation: Federation, starts: Mapping[str, str]) -> dict[str, str]:
    """Return the clients, fewer than half, that start from something else than the server, and why they may not."""
    here = start_of(federation)
    differ = sorted(client for client, start in starts.items() if start != here)
    if differ and 2 * len(differ) >= len(starts):
        raise ValueError(
            f"client '{differ[0]}' does not start from what the server starts from: run the same "
            "model, method and hierfl at both, with starting values that do not depend on rows, and "
            f"in one precision. The server's is {torch.get_default_dtype()}; that of nodes by files is "
            "torch.float64: call torch.set_default_dtype(torch.float64) first"
        )
    why = "it does not start from what the server starts from"
    for client in differ:
        warn(f"client '{client}' is left out: {why}")
    return dict.fromkeys(differ, why)
