"""Clients join a fit over nodes, or send new rows: their nodes alone are asked, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hierfl.core.importance_sampling import K_HAT
from hierfl.engine.client_store import new_table
from hierfl.engine.left_out import absent_from, with_absent
from hierfl.engine.rounds import Progress, one_round
from hierfl.methods.stages.checks import DONE
from hierfl.methods.stages.joined import carried, joined
from hierfl.methods.stages.kept import AnotherRound, Kept, rounds_of
from hierfl.methods.stages.weighting import PROPOSING
from hierfl.nodes.agreement import Agreement, Fields, Introduction
from hierfl.nodes.asking import COUNTED, Answer, Ask, last_counted
from hierfl.nodes.choosing import Decided
from hierfl.nodes.living import Fitted, forget
from hierfl.nodes.node import run_name
from hierfl.nodes.run import Nodes, TooFewNodes, other_starts, without_rows
from hierfl.nodes.update_checks import without_one
from hierfl.runs.joining import WHAT, places_of

if TYPE_CHECKING:
    from hierfl.nodes.gathering import Agree

ROUNDS = 2  # of the new clients: a factor, and log ratios
ALL = "begin a run over the nodes of all clients, hierfl.nodes.fit(model, nodes)"


def join_introduced(
    fit: Fitted,
    found: Mapping[Any, Introduction],
    agree: Agree[Any],
    ask: Callable[[Mapping[str, Any]], Ask],
    absent: Mapping[str, str],
) -> Fitted:
    """Let new nodes agree on what the others have agreed on, and ask them for two rounds."""
    old, method = fit.federation, fit.method
    before = Kept(rounds_of(method, old.program, WHAT), fit.progress.server)
    if before.rounds.gathers is not None:
        raise ValueError(f"each round spends a part of the rows' privacy budget: {ALL}")
    ids = {one.client: key for key, one in found.items()}
    if len(ids) < len(found):
        raise ValueError("two of the nodes have a client of the same name: give each its own name")
    agreement = _agreed(fit, found)
    starts, refused = agree(agreement, Decided(method, fit.rounds, fit.chosen), ids)
    everyone, fills = without_rows(method, agreement, old.seed, None, None)
    refused = {**refused, **other_starts(everyone, starts)}
    if refused:
        raise TooFewNodes("; ".join(f"client '{name}': {why}" for name, why in refused.items()))
    few = replace(everyone, data=agreement.few_made_up(fills))
    run, asked = run_name(method, agreement, old.seed), ask(ids)
    nodes = Nodes(method, everyone, few, run, asked, len(ids), {})
    where = _two_rounds(fit, before, nodes, sorted(ids))
    counted = {**last_counted(old, fit.progress.history), **nodes.counted}
    known = [
        {"client": name, "round": counted[name]} for name in agreement.names if name in counted
    ]
    absent = {**absent_from(where.history), **absent}
    absent = {name: why for name, why in absent.items() if name not in ids}
    last = {**where.history[-1], COUNTED: known}
    earlier = [with_absent(record, {}) for record in where.history[:-1]]
    history = (*earlier, with_absent(last, absent))
    where = replace(where, history=history)
    return replace(
        fit,
        federation=replace(everyone, data=agreement.absent_rows(fills)),
        progress=where,
        ask=_Either(fit.ask, asked, frozenset(ids)),
        joined={**fit.joined, **dict.fromkeys(ids, run)},
        ended=frozenset(),
    )


def _agreed(fit: Fitted, found: Mapping[Any, Introduction]) -> Agreement:
    """Return what all clients agree on, the new ones with the others."""
    data, new = fit.federation.data, {one.client for one in found.values()}
    form, codes = Fields.of(data), dict(fit.program.codes)
    others = [
        Introduction(name, rows, form, codes)
        for name, rows in zip(data.names, data.counts.tolist(), strict=True)
        if name not in new
    ]
    return Agreement.between([*others, *found.values()])


def _two_rounds(fit: Fitted, before: Kept, nodes: Nodes, new: list[str]) -> Progress:
    """Ask new clients for their factors, then for log ratios; refuse where others would have to be asked."""
    everyone, old = nodes.federation, fit.federation
    after = rounds_of(fit.method, everyone.program, WHAT)
    stay = [name for name in old.data.names if name not in new]
    places = [places_of(of, stay) for of in (old, everyone)]
    table = new_table(everyone.client.own, everyone.data.num_clients)
    state = joined(before, after, *places)
    where = replace(fit.progress, server=state, table=table)
    guarded = replace(everyone, server=without_one(everyone.server, nodes.latest))
    ids, until = everyone.data.index(new), where.round + ROUNDS
    where = one_round(guarded, where, until, nodes.work, ids=ids)
    where = replace(where, server=carried(before, after, where.server, *places))
    if int(where.server["stage"]) != DONE:
        if not bool(where.server["weighted"][places[1]].all()):
            raise AnotherRound(
                "the others' log ratios cannot be carried over to the posterior with the new "
                f"clients, so that the others have to weight its draws: {ALL}"
            )
        where = one_round(guarded, where, until, nodes.work, ids=ids)
    server = where.server
    share = float(server["effective"]) / len(server["ratios"])
    if before.is_exact or (float(server["k_hat"]) < K_HAT and share >= PROPOSING):
        return where
    raise AnotherRound(
        f"k-hat is {float(server['k_hat']):.2f}, and {share:.0%} of the draws are effective: the "
        f"others' factors no longer fit the posterior; {ALL}"
    )


@dataclass(frozen=True, eq=False)
class _Either:
    """Asks the nodes that were there, and those of the clients `names`, which are new."""

    old: Ask
    new: Ask
    names: frozenset[str]

    def __call__(self, contents: Mapping[str, bytes]) -> Iterator[Answer]:
        """Ask clients for a round."""
        for of, mine in ((self.old, False), (self.new, True)):
            asked = {k: v for k, v in contents.items() if (k in self.names) is mine}
            if asked:
                yield from of(asked)

    def forget(self, client: str) -> None:
        """Remove what the transports keep of a client's answers."""
        for of in (self.old, self.new):
            forget(of, client)
