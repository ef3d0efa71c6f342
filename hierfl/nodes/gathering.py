"""A fit over nodes from their introductions on, without those that fail on the way: each is named, with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, TypeVar

import torch

from hierfl.data.clients import ClientData
from hierfl.laplace.trials import FAILS, moved_rows, terms_at, trial
from hierfl.nodes.agreement import Agreement, Introduction
from hierfl.nodes.asking import Ask
from hierfl.nodes.call import FitCall
from hierfl.nodes.choosing import Decided, decided
from hierfl.nodes.fit_over_nodes import FitOverNodes
from hierfl.nodes.run import LONGEST, TooFewNodes, fit_nodes
from hierfl.nodes.together import AskSum
from hierfl.program.few_rows import point
from hierfl.program.read import read_model
from hierfl.program.sites import Model

Key = TypeVar("Key")  # of a node, to the transport
# (what all agree on, what is run, client -> its node) -> what each client starts from, and why others do not
Agree = Callable[
    [Agreement, Decided, Mapping[str, Key]], tuple[Mapping[str, str], Mapping[str, str]]
]


def check_enough(found: Sized, left_out: Mapping[Any, str], fewest: int, do: str) -> None:
    """Warn of each client, or node by its number, that is left out; refuse to go on with fewer than `fewest`."""
    named = {
        f"client '{who}'" if isinstance(who, str) else f"node {who}": why[:LONGEST]
        for who, why in left_out.items()
    }
    if len(found) < fewest:
        why = "; ".join(f"{who}: {reason}" for who, reason in named.items())[:2000]
        raise TooFewNodes(f"{len(found)} nodes {do}, and {fewest} are needed ({why})")
    for who, reason in named.items():
        warnings.warn(f"{who} is left out: {reason}", stacklevel=4)


def _whose_codes_run(
    call: FitCall, introductions: Sequence[Introduction]
) -> tuple[Agreement, dict[str, str]]:
    """Return what most nodes agree on, without those alone with codes at which the model fails, who are named."""
    agreement, differ = Agreement.of_most(introductions)
    left = {one.client: one for one in introductions if one.client in agreement.names}
    model: Any = call.named.model if call.named else call.method
    least, odd = len(left) // 2 + 1, dict[str, str]()
    while (far := _alone_with_codes(left.values())) and _fails(model, agreement):
        if len(left) <= least:  # it fails by itself
            return Agreement.of_most(introductions)
        client, name = far
        del left[client]
        agreement = Agreement.between(list(left.values()))
        odd[client] = f"no other client has its codes of field '{name}', at which the model fails"
    return agreement, differ | odd


def _alone_with_codes(introductions: Iterable[Introduction]) -> tuple[str, str] | None:
    """Return the client that has the code farthest beyond all others', and its field; None: nobody has."""
    found = {}
    for name in {name for one in introductions for name in one.codes}:
        for sign, end in ((-1, 0), (1, 1)):
            ends = sorted((sign * one.codes[name][end], one.client) for one in introductions)
            if len(ends) > 2 and ends[-1][0] > ends[-2][0]:
                found[ends[-1][0] - ends[-2][0]] = ends[-1][1], name
    return found[max(found)] if found else None


def _fails(model: Model, agreement: Agreement) -> bool:
    """Return whether a model fails on rows of agreed codes, where it can be read without rows."""

    def fails(data: ClientData) -> bool:
        program, g = agreement.agreed(read_model(model, data).program), torch.Generator()
        with trial():
            try:
                terms_at(program, point(program, 0.0)[1], moved_rows(program, g.manual_seed(0)))
            except FAILS:
                return True
        return False

    with suppress(ValueError):
        return agreement.tried(fails, "{}")[0]
    return False


def fit_introduced(
    call: FitCall,
    found: Mapping[Key, Introduction],
    fewest: int,
    agree: Agree[Key],
    ask: Callable[[Mapping[str, Key]], Ask],
    ask_sum: Callable[[Mapping[str, Key]], AskSum] | None = None,
    absent: Mapping[str, str] | None = None,
) -> FitOverNodes:
    """Let nodes agree, and fit; a method that needs every client begins again without one that fails.

    `absent` nodes have failed before, for a reason.
    """
    absent = dict(absent or {})
    while True:
        agreement, differ = _whose_codes_run(call, list(found.values()))
        absent |= differ
        ids = {one.client: key for key, one in found.items() if one.client in agreement.names}
        check_enough(ids, differ, fewest, "have rows of one form")
        run = decided(call, agreement)
        starts, refused = agree(agreement, run, ids)
        check_enough(starts, refused, fewest, "agree on a run")
        lost = dict(refused) if run.method.everyone else {}
        if not lost:
            try:
                return fit_nodes(
                    run.method,
                    agreement,
                    ask(ids),
                    rounds=run.rounds,
                    seed=call.seed,
                    cohort=call.cohort,
                    fewest=fewest,
                    starts=starts,
                    checkpoint=call.checkpoint,
                    resume=call.resume,
                    chosen=run.why,
                    read=run.read,
                    ask_sum=None if ask_sum is None else ask_sum(ids),
                    absent={name: why[:LONGEST] for name, why in absent.items()},
                )
            except TooFewNodes as error:
                lost = dict.fromkeys(error.missing, str(error))
                if not lost or len(ids) - len(lost) < fewest or call.checkpoint is not None:
                    raise
                who = ", ".join(f"client '{name}'" for name in lost)
                warnings.warn(f"{who} is left out, and the run begins again: {error}", stacklevel=3)
        absent |= lost
        left = ids.keys() - lost.keys()
        found = {key: one for key, one in found.items() if one.client in left}
