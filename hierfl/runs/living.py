"""A federation that lives: a client leaves a fit of two_stage, others join it or send new rows."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, expect_count
from hierfl.core.disk import write_private
from hierfl.core.process import one_at_a_time
from hierfl.core.trees import Tree, named_leaves
from hierfl.core.user_warnings import warn
from hierfl.data.absent import RowsNotSaved, is_absent
from hierfl.engine.client_store import CheckpointError, Stored, subset
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import Progress
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.methods.stages.kept import AnotherRound, Kept, rounds_of
from hierfl.methods.stages.server import Rounds
from hierfl.program.program import Program
from hierfl.runs import checkpoint as state_files
from hierfl.runs import saved
from hierfl.runs.records import about
from hierfl.runs.run_folder import ROWS, checkpoints, discard, held
from hierfl.runs.saved import Fitted

CERTIFICATE = "withdrawn.json"  # in the folder of a fit that a client has left
LEFT = "withdrawn"  # of the history: what was removed
BY_CLIENT = ("left_out", "far_out", "conflicts")  # of the history: lists of clients
KEPT_STILL = (
    "what all clients agreed on before the first round (a schema, its means and levels), and the "
    "other clients' factors, which were computed around a posterior that this client had a part in"
)


@one_at_a_time
def without(
    fit: Fitted, client: str, *, rounds: int = 0, folder: str | Path | None = None
) -> Fitted:
    """Return the fit without one of its clients, from what the server of two_stage has stored.

    No round is run and nobody is asked. For a Gaussian likelihood, draws come from the posterior
    given the others' sums. Otherwise, draws are weighted by the others' log ratios, which a
    polynomial of the global parameters carries over to new draws. The last row of the history has
    k-hat and the error. The returned fit holds nothing of the client; `certificates` says what was
    removed.

    Args:
        fit: of two_stage.
        client: its name.
        rounds: how many rounds the others may take to weight new draws if what is stored does not
            suffice.
        folder: the folder of the saved fit, which the one without the client and its certificates,
            `withdrawn.json`, replace. Backups are not changed. None: no folder is changed.

    Raises:
        KeyError: the client was not fitted.
        ValueError: the fit is not of two_stage, is not done, or has no other client.
        AnotherRound: what is stored does not suffice (k-hat, or an error above 0.1 nats).
        CheckpointError: the folder does not hold this fit.
    """
    expect_count(rounds, "rounds", least=0)
    old = fit.federation
    out = leaving(old, client)
    if folder is not None:
        _check_can_be_rewritten(fit, Path(folder))
    if is_absent(old.data):
        federation = restricted_to(old, out)
    else:
        others = old.data.select((~out).nonzero()[:, 0])
        federation = federate(fit.method, others, seed=old.seed, settings=old.settings)
        federation = replace(federation, cohort=min(old.cohort, others.num_clients))
    progress = left_by(old, fit.progress, federation, out, rounds)
    fitted = replace(fit, federation=federation, progress=progress)
    if folder is not None:
        _rewrite(fit, fitted, Path(folder))
    return fitted


def leaving(federation: Federation, client: str) -> Tensor:
    """Return which client leaves, (N,) bool."""
    names = federation.data.names
    if client not in names:
        some = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
        raise NoSuchName(f"client '{client}' is not in this fit, but {some}")
    if len(names) < 2:
        raise ValueError(f"client '{client}' is the only one: remove the fit itself")
    return torch.tensor([name == client for name in names])


def restricted_to(federation: Federation, out: Tensor) -> Federation:
    """Return a federation without rows, and without the clients of a mask (N,)."""
    stay = (~out).nonzero()[:, 0]
    data = federation.data.select(stay)
    program: Program = replace(
        federation.program,
        num_clients=len(stay),
        client_keys=federation.program.client_keys[stay],
        ranks=data.by_name.argsort(),
    )
    method = federation.method
    made = replace(federation, program=program, data=data)
    made = replace(made, client=method.client(program), server=method.server(program))
    return replace(made, cohort=min(federation.cohort, len(stay)))


def left_by(
    old: Federation, where: Progress, new: Federation, out: Tensor, rounds: int = 0
) -> Progress:
    """Return the progress without the clients of a mask (N,); the others may be asked for `rounds`."""
    began, data = time.perf_counter(), old.data
    what = "the posterior without a client"
    before = Kept(rounds_of(old.method, old.program, what), where.server)
    after: Rounds = rounds_of(new.method, new.program, what)
    table = subset(where.table, (~out).nonzero()[:, 0])
    records: tuple[dict[str, Any], ...] = ()
    try:
        server = before.without(out[data.by_name], after)
    except AnotherRound:
        if not rounds:
            raise
        begun = Progress(before.asking(out[data.by_name], after), table, (), where.round)
        done = [begun, *run_rounds(new, begun, where.round + rounds)][-1]
        server, table, records = done.server, done.table, done.history
    names = {data.names[i] for i in out.nonzero()[:, 0].tolist()}
    record = {
        "round": where.round + len(records),
        "clients": new.data.num_clients,
        **new.server.logged(server),
        LEFT: [
            {
                "client": name,
                "rows": int(data.counts[data.index([name])[0]]),
                "when": datetime.now(UTC).isoformat(" ", "seconds"),
                "before": digest_of(where.server),
                "after": digest_of(server),
                "kept": KEPT_STILL,
            }
            for name in sorted(names)
        ],
        "bytes_down": 0,
        "bytes_up": 0,
        "seconds": time.perf_counter() - began,
    }
    unnamed = replace(where, history=tuple(_unnamed(row, names) for row in where.history))
    return unnamed.advanced(server, table, [*records, record], len(records) + 1)


def digest_of(tree: Tree) -> str:
    """Return the SHA-256 of all that a server has."""
    digest = hashlib.sha256()
    for name, value in named_leaves(tree).items():
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + flat.numpy().tobytes())
    return digest.hexdigest()


def _unnamed(record: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a row of the history without what it says of some clients."""
    others = dict(record)
    for key in filter(record.get, BY_CLIENT):
        others[key] = [entry for entry in record[key] if entry.get("client") not in names]
    return others


def certificates(history: tuple[dict[str, Any], ...]) -> pd.DataFrame:
    """Return what was removed when clients left, one row per client."""
    rows = [{**entry, "round": row["round"]} for row in history for entry in row.get(LEFT) or ()]
    columns = ["client", "rows", "when", "before", "after", "kept", "round"]
    return pd.DataFrame(rows, columns=columns)


# ---------------------------------------------------------------------------------------- on disk
def _check_can_be_rewritten(fit: Fitted, folder: Path) -> None:
    who = about(fit.method, fit.federation, fit.rounds)
    if is_absent(fit.federation.data):
        raise RowsNotSaved(f"a fit without its clients' rows is not saved again: {saved.HAND_IN}")
    is_there = any(state_files.is_of_run(path, who) for path in checkpoints(folder))
    if not is_there or isinstance(fit.progress.table, Stored):
        what = f"'{folder}' does not hold this fit, or client states in a file of their own"
        fix = "save the fit without the client to another folder, and remove the old one"
        raise CheckpointError(f"{what}: {fix}")


def _rewrite(fit: Fitted, smaller: Fitted, folder: Path) -> None:
    """Put the fit without a client in the place of that with it."""
    old = about(fit.method, fit.federation, fit.rounds)
    with_data = any((path / ROWS).exists() for path in checkpoints(folder))
    new = about(smaller.method, smaller.federation, smaller.rounds)
    beside = saved.beside(smaller.federation, with_data=with_data)
    with held(folder):
        rewritten(folder, old, smaller.progress, new, beside)


def rewritten(
    folder: Path,
    old: Mapping[str, Any],
    progress: Progress,
    new: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Write a run of fewer clients, then remove every checkpoint of the run of all."""
    state_files.save(folder, progress, new, beside=beside)
    discard(folder, lambda path: state_files.is_of_run(path, old))
    remaining = [path.name for path in checkpoints(folder) if state_files.is_of_run(path, old)]
    if remaining:
        what = f"'{folder}/{remaining[0]}' holds files that are not hierfl's, and was not removed"
        raise CheckpointError(f"{what}: what the client had sent is in it; remove it")
    if aside := sorted(path.name for path in folder.glob("*.aside-*")):
        what = f"'{folder}/{aside[0]}' was set aside by hierfl, and may hold what the client"
        warn(f"{what} had sent: see what it is, and remove it")
    if len(table := certificates(progress.history)):
        write_private(folder / CERTIFICATE, json.dumps(table.to_dict("records"), indent=1).encode())
