"""`hierfl.nodes.fit`, from the introductions of nodes on, without those that fail; and nodes that join a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hierfl.core.arguments import spelled
from hierfl.core.importance_sampling import K_HAT
from hierfl.core.user_warnings import warn
from hierfl.engine.client_store import new_table
from hierfl.engine.exact_sums import AskSum
from hierfl.engine.federation import Disclose
from hierfl.engine.rounds import Progress, absent_from, one_round, with_absent
from hierfl.method import Method
from hierfl.methods.stages.joined import carried, joined
from hierfl.methods.stages.kept import AnotherRound, Kept, rounds_of
from hierfl.methods.stages.weighting import PROPOSING
from hierfl.nodes.agreement import Agreement, Fields, Introduction, whose_codes_run
from hierfl.nodes.choosing import Decided, FitCall, decided
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.living import forget
from hierfl.nodes.messages import COUNTED, Answer, Ask, last_counted
from hierfl.nodes.node import run_name
from hierfl.nodes.run import LONGEST, Nodes, TooFewNodes, fit_nodes, other_starts, without_rows
from hierfl.nodes.updates import without_one
from hierfl.program.sites import Model
from hierfl.runs.joining import WHAT, places_of

MAJORITY = 2  # new clients that tell a third one that lies from a posterior that has moved
ROUNDS = 2  # of clients that join: a factor, and log ratios
ALL = "begin a run over the nodes of all clients, hierfl.nodes.fit(model, nodes)"
Key = TypeVar("Key")  # of a node, to the transport
# (what all agree on, what is run, client -> its node) -> what each client starts from, and why others do not
Agree = Callable[
    [Agreement, Decided, Mapping[str, Key]], tuple[Mapping[str, str], Mapping[str, str]]
]


@spelled
def fit(
    model: Method | Model,
    nodes: Any,
    *,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    disclose: Disclose = "summaries",
) -> FitOverNodes:
    """Fit a model, or a method, to clients whose rows are on machines of their own.

    Draws of the global sites are here; nodes are asked for summaries, draws and predictions of
    their clients.

    Args:
        model: a function of a `ClientBatch`, or a `hierfl.formula`: its method is chosen by the
            rule of `hierfl.fit`, from what the nodes agree on. Without a schema, nodes first agree
            on one. Or a method. A chosen method that does not stop automatically runs for 200
            rounds, and hierfl does not check whether that is enough.
        nodes: what asks them: `hierfl.flower.superlink(...)`, `hierfl.nodes.by_files(...)`,
            `over(...)`, or `in_process(...)`, to try it in this process.
        rounds: as in `hierfl.fit`.
        seed: determines all randomness.
        cohort: clients per round: None for all, a count, or a share in (0, 1].
        checkpoint: folder to write a checkpoint to after each round.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        disclose: what the server may see: "summaries" of each client, or only "sums" over clients.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: as `hierfl.fit`; or the program cannot be read without rows.
        ProgramError: a model or guide that cannot be run as it is written.
        Forbidden: no node's policy allows the run (`in_process`).
        TooFewNodes: of a round, or before the first one.
    """
    if not callable(getattr(nodes, "reached", None)):
        raise TypeError(
            f"nodes is a {type(nodes).__name__}: make it with hierfl.flower.superlink(...), or "
            "with hierfl.nodes.in_process(...) to try it here"
        )
    call = FitCall(model, rounds, seed, cohort, disclose, checkpoint, resume)
    fitted: FitOverNodes = nodes.reached(call).fit_over(call)
    return fitted


def _called(who: Any) -> str:
    return f"client '{who}'" if isinstance(who, str) else f"node {who}"


def reasons(left_out: Mapping[Any, str]) -> str:
    """Return why clients, or nodes by their numbers, are left out, in a line."""
    return "; ".join(f"{_called(who)}: {why[:LONGEST]}" for who, why in left_out.items())


def check_enough(present: Sized, left_out: Mapping[Any, str], fewest: int, do: str) -> None:
    """Warn of each client, or node by its number, that is left out; refuse to go on with fewer than `fewest`."""
    if len(present) < fewest:
        why = reasons(left_out)[:2000]
        raise TooFewNodes(f"{len(present)} nodes {do}, and {fewest} are needed ({why})")
    for who, why in left_out.items():
        warn(f"{_called(who)} is left out: {why[:LONGEST]}")


def _begun_again(
    model: Model,
    introduced: Mapping[Key, Introduction],
    fewest: int,
    run: Callable[[Agreement, Mapping[str, Key], Mapping[str, str]], FitOverNodes],
    absent: Mapping[str, str],
    old: Sequence[Introduction] = (),
) -> FitOverNodes:
    """Return what is run over nodes of rows of one form, begun again without each that must answer and fails.

    `run` takes what all agree on, client -> its node, and clients that are absent, for a reason;
    `old` clients are not asked, save those who introduce themselves again.
    """

    def everyone() -> list[Introduction]:
        clients = {of.client for of in introduced.values()}
        return [*(of for of in old if of.client not in clients), *introduced.values()]

    common, differ = whose_codes_run(model, everyone())
    if not_new := sorted(differ.keys() - {of.client for of in introduced.values()}):
        raise ValueError(differ[not_new[0]])
    absent = {**absent, **differ}
    introduced = {key: of for key, of in introduced.items() if of.client in common.names}
    check_enough(introduced, differ, fewest, "have rows of one form")
    while True:
        ids = {of.client: key for key, of in introduced.items()}
        try:
            return run(Agreement.between(everyone()), ids, absent)
        except TooFewNodes as error:
            if not error.missing or len(ids) - len(error.missing) < fewest:
                raise
            for who, why in error.missing.items():
                warn(f"{_called(who)} is left out, and the run begins again: {why[:LONGEST]}")
            absent = {**absent, **error.missing}
            introduced = {k: of for k, of in introduced.items() if of.client not in absent}


def fit_introduced(
    call: FitCall,
    introduced: Mapping[Key, Introduction],
    fewest: int,
    agree: Agree[Key],
    ask: Callable[[Mapping[str, Key]], Ask],
    ask_sum: Callable[[Mapping[str, Key]], AskSum] | None = None,
    absent: Mapping[str, str] | None = None,
) -> FitOverNodes:
    """Let nodes agree, and fit; a method that needs every client begins again without one that fails.

    `absent` nodes have failed before, for a reason.
    """

    def run(
        agreement: Agreement, ids: Mapping[str, Key], absent: Mapping[str, str]
    ) -> FitOverNodes:
        what = decided(call, agreement)
        starts, refused = agree(agreement, what, ids)
        check_enough(starts, refused, fewest, "agree on a run")
        if refused and what.method.everyone:
            raise TooFewNodes(reasons(refused), refused)
        how: Any = {"rounds": what.rounds, "seed": call.seed, "cohort": call.cohort}
        how |= {"checkpoint": call.checkpoint, "resume": call.resume, "read": what.read}
        how |= {"fewest": fewest, "starts": starts, "chosen": what.why}
        how["absent"] = {name: why[:LONGEST] for name, why in absent.items()}
        how["ask_sum"] = None if ask_sum is None else ask_sum(ids)
        try:
            return fit_nodes(what.method, agreement, ask(ids), **how)
        except TooFewNodes as error:
            if call.checkpoint is not None:  # from which the run can go on
                error.missing = {}
            raise

    return _begun_again(call.model, introduced, fewest, run, absent or {})


def join_introduced(
    fit: FitOverNodes,
    introduced: Mapping[Any, Introduction],
    fewest: int,
    agree: Agree[Any],
    ask: Callable[[Mapping[str, Any]], Ask],
    absent: Mapping[str, str],
) -> FitOverNodes:
    """Let new nodes agree on what the others have agreed on, and ask them for two rounds; or without one that fails."""
    old, method = fit.federation, fit.method
    before = Kept(rounds_of(method, old.program, WHAT), fit.progress.server)
    if before.rounds.gathers is not None:
        raise ValueError(f"each round spends a part of the rows' privacy budget: {ALL}")
    form, codes = Fields.of(old.data), dict(fit.program.codes)
    counts = zip(old.data.names, old.data.counts.tolist(), strict=True)

    def run(
        agreement: Agreement, ids: Mapping[str, Any], absent: Mapping[str, str]
    ) -> FitOverNodes:
        starts, refused = agree(agreement, Decided(method, fit.rounds, fit.chosen), ids)
        everyone, few, rowless = without_rows(method, agreement, old.seed, None, None)
        if refused := {**refused, **other_starts(everyone, starts)}:
            raise TooFewNodes(reasons(refused), refused)
        name, ask_new = run_name(method, agreement, old.seed), ask(ids)
        nodes = Nodes(replace(method, everyone=True), everyone, few, name, ask_new, fewest, {})
        where = _two_rounds(fit, before, nodes, sorted(ids))
        counted = {**last_counted(old, fit.progress.history), **nodes.counted}
        stay = [{"client": n, "round": counted[n]} for n in agreement.names if n in counted]
        out = {n: w for n, w in {**absent_from(where.history), **absent}.items() if n not in ids}
        earlier = [with_absent(record, {}) for record in where.history[:-1]]
        history = (*earlier, with_absent({**where.history[-1], COUNTED: stay}, out))
        return replace(
            fit,
            federation=rowless,
            progress=replace(where, history=history),
            ask=_Either(fit.ask, ask_new, frozenset(ids)),
            joined={**fit.joined, **dict.fromkeys(ids, name)},
            ended=frozenset(),
        )

    others = [Introduction(name, rows, form, codes) for name, rows in counts]
    try:
        return _begun_again(method.model, introduced, fewest, run, absent, others)
    except _Unfit as error:
        fewer = {key: of for key, of in introduced.items() if of.client != error.client}
        if len(fewer) < max(fewest, MAJORITY):
            raise
        with suppress(AnotherRound, TooFewNodes):  # it is not this client's alone
            absent = {**absent, error.client: str(error)}
            without = _begun_again(method.model, fewer, fewest, run, absent, others)
            warn(f"client '{error.client}' is left out: {error}")
            return without
        raise


class _Unfit(AnotherRound):
    """Draws do not suffice with clients that join, of which the log ratios of `client` vary most."""

    client = ""


def _two_rounds(fit: FitOverNodes, before: Kept, nodes: Nodes, new: list[str]) -> Progress:
    """Ask new clients for their factors, then for log ratios; refuse where others would have to be asked."""
    everyone, old = nodes.federation, fit.federation
    after = rounds_of(fit.method, everyone.program, WHAT)
    stay = [name for name in old.data.names if name not in new]
    places = [places_of(of, stay) for of in (old, everyone)]
    table = new_table(everyone.client.own, everyone.data.num_clients)
    state = joined(before, after, *places)
    where = replace(fit.progress, server=state, table=table)
    guarded = without_one(everyone, fit.method.name, nodes.latest)
    ids, until = everyone.data.index(new), where.round + ROUNDS
    where = one_round(guarded, where, until, nodes.work, ids=ids)
    nodes.name_left_out(where.history)
    where = replace(where, server=carried(before, after, where.server, *places))
    if not where.server.is_done:
        if not bool(where.server.weighted[places[1]].all()):
            raise AnotherRound(
                "the others' log ratios cannot be carried over to the posterior with the new "
                f"clients, so that the others have to weight its draws: {ALL}"
            )
        where = one_round(guarded, where, until, nodes.work, ids=ids)
        nodes.name_left_out(where.history)
    server = where.server
    share = float(server.effective) / len(server.ratios)
    if before.is_exact or (float(server.k_hat) < K_HAT and share >= PROPOSING):
        return where
    error = _Unfit(
        f"k-hat is {float(server.k_hat):.2f}, and {share:.0%} of the draws are effective: the "
        f"others' factors no longer fit the posterior; {ALL}"
    )
    ratios = {n: server.each[:, int(everyone.data.index([n])[0])] for n in new}
    error.client = max(ratios, key=lambda n: float(ratios[n].max() - ratios[n].median()))
    raise error


@dataclass(frozen=True, eq=False)
class _Either:
    """Asks the nodes that were there, and those of the clients `names`, which are new."""

    old: Ask
    new: Ask
    names: frozenset[str]

    def __call__(self, contents: Mapping[str, bytes]) -> Iterator[Answer]:
        """Ask clients for a round."""
        for ask, is_new in ((self.old, False), (self.new, True)):
            its = {k: v for k, v in contents.items() if (k in self.names) is is_new}
            if its:
                yield from ask(its)

    def forget(self, client: str) -> None:
        """Remove what the transports keep of a client's answers."""
        for ask in (self.old, self.new):
            forget(ask, client)
