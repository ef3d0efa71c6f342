"""How a fit over nodes asks about clients after the rounds, and reads what nodes answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from hierfl.core.trees import Tree, nbytes
from hierfl.data.clients import ClientData
from hierfl.engine.client_store import taken
from hierfl.nodes.account import END
from hierfl.nodes.answers import FromNodes
from hierfl.nodes.asking import AfterKind, Answer, StateRequest, last_counted, mail_of
from hierfl.nodes.local_fit import without_few
from hierfl.nodes.messages import Refused, check_numbers, from_bytes, to_bytes

MOST = 1 << 31  # bytes of an answer
Found = TypeVar("Found")


def ask_nodes(
    fit: Any,
    kind: AfterKind,
    read: Callable[[Tree], Found],
    rows: ClientData | None = None,
    clients: Collection[str] | None = None,
    **options: Any,
) -> FromNodes[Found]:
    """Ask the nodes of all clients, of some, or of those that some rows belong to."""
    if clients is None:
        clients = fit.clients if rows is None else rows.names
    fit.federation.data.index(clients)  # refuses unknown clients
    contents = {name: _question(fit, kind, name, rows, options) for name in clients}
    given: dict[str, Found] = {}
    withheld: dict[str, str] = {}
    for one in fit.ask(contents):
        if one.client not in contents or one.client in given:
            continue
        try:
            given[one.client] = read(_read(fit, one, kind))
            withheld.pop(one.client, None)
        except Exception as error:  # whatever crafted bytes raise
            withheld.setdefault(one.client, str(error)[:500])
    for name in contents:
        if name not in given:
            withheld.setdefault(name, "it did not answer")
    ordered = {name: given[name] for name in clients if name in given}
    return FromNodes(ordered, dict(sorted(withheld.items())))


def imputed_at_nodes(fit: Any, draws: int = 1000, *, seed: int = 0) -> FromNodes[None]:
    """Let each node draw what its client's rows lack of the covariates of `mi()`, as `hierfl.Fit.imputed` does.

    A node writes the table into its folder, for its owner. It sends nothing, whatever its policy says.

    Args:
        fit: over nodes, of a formula.
        draws: S.
        seed: of the draws.

    Raises:
        ValueError: the model is no formula with `mi()`.
    """
    declared = getattr(fit.method.model, "declared", None)
    if declared is None or not declared.imputed:
        raise ValueError("the model is no formula with mi(x), so that nothing is imputed")
    return ask_nodes(fit, "imputed", lambda found: None, draws=draws, seed=seed)


def end_run(fit: Any, clients: Collection[str]) -> frozenset[str]:
    """Send clients the state that a run has ended with; return those whose nodes answer under it alone from now on."""
    ended = set()
    with suppress(Exception):  # of a transport: a later question tells it
        for answer in fit.ask({name: _question(fit, END, name, None, {}) for name in clients}):
            with suppress(Refused):
                if from_bytes(answer.content, most=MOST).about == _about(fit, answer.client, END):
                    ended.add(answer.client)
    return frozenset(ended & {*clients})


def _about(fit: Any, client: str, kind: str) -> dict[str, Any]:
    """Return what a node's answer to a question says of itself."""
    return {"run": fit.joined.get(client, fit.run), "client": client, "kind": kind}


def _question(
    fit: Any, kind: str, name: str, rows: ClientData | None, options: Mapping[str, Any]
) -> bytes:
    place = int(fit.federation.data.index([name])[0])
    own = taken(fit.progress.table, torch.tensor([place]))
    given = {} if rows is None else dict(rows.select([name]).fields)
    counted = last_counted(fit.federation, fit.progress.history).get(name, -1)
    run, ends = fit.joined.get(name, fit.run), kind == END or name not in fit.ended
    request = StateRequest(kind, run, fit.progress.round, counted, ends, **options)  # type: ignore[arg-type]
    tree = {"message": fit.message, "mail": mail_of(own, 0), "rows": given}
    return to_bytes(tree, asdict(request))


def _read(fit: Any, found: Answer, kind: AfterKind) -> Tree:
    """Return what a node released in answer to this question; refuse any other."""
    if found.content is None:
        raise Refused(found.reason or "it did not answer")
    answered = from_bytes(found.content, most=MOST)
    said = {name: answered.about.get(name) for name in ("run", "client", "kind")}
    if said != _about(fit, found.client, kind):
        run, client, kind_ = (str(each)[:40] for each in said.values())
        raise Refused(f"its answer is of run {run}, client {client}: {kind_}")
    if "stays" in answered.about:
        raise Refused(str(answered.about["stays"])[:500])
    check_numbers(answered.tree)
    if not nbytes(answered.tree):
        raise Refused("its answer is empty")
    return without_few(answered.tree, answered.about.get("few", {}))
