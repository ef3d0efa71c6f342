"""`fit`: a method, data, rounds, and what comes of it; `load`: the same, from disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hierfl.data.clients import ClientData
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import Federation, about, federate
from hierfl.engine.pooled import pooled_rounds
from hierfl.engine.rounds import Progress, begin, worth_compiling
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.method import Method
from hierfl.program.recipes import remake
from hierfl.runs import checkpoint as state
from hierfl.runs import saved
from hierfl.runs.result import Fit


def fit(
    method: Method,
    data: ClientData,
    *,
    rounds: int,
    seed: int = 0,
    cohort: int | float | None = None,
    engine: Literal["vectorised", "sequential", "pooled"] = "vectorised",
    chunk: int | None = None,
    compile: Literal["auto"] | bool = "auto",
    device: str | torch.device = "cpu",
    checkpoint: str | Path | None = None,
    every: int = 10,
    resume: bool = False,
    held_out: ClientData | None = None,
    score_every: int = 10,
    patience: int | None = None,
    progress: bool | None = None,
) -> Fit:
    """Fit a method to a federation.

    Args:
        method: from `hierfl.methods`, or one's own `Method`.
        data: the clients' training rows.
        rounds: exchanges between server and clients.
        seed: of everything random. Noise is a function of (seed, client, step, site), so no result depends on engine or order.
        cohort: clients a round: None for all, a count, or a share in (0, 1].
        engine: "vectorised" carries many clients at once, "sequential" one after another, "pooled" all in one Pyro plate, as if
            the rows had been brought together (for methods that have such a form): the same numbers.
        chunk: clients carried at once by "vectorised"; None: as many as fit the cache.
        compile: whether each kind of local step becomes one compiled graph (numbers agree to float noise); "auto": where the
            run is long enough to repay it, by one eager step that is measured. A resumed run does as the run before it did.
            From the second round on, chunks of clients are then shared out among copies of this process, as many as
            `torch.get_num_threads()` with this one (on Linux; elsewhere all is done here).
        device: where clients work, "cuda" say; the server, what clients keep, and the fit that comes back stay with the processor.
        checkpoint: folder to write checkpoints to.
        every: rounds between checkpoints; the last round is always written.
        resume: go on from the newest whole checkpoint of that folder, if there is one.
        held_out: labelled rows of the same clients; their mean log score is logged every `score_every` rounds.
        score_every: rounds between scores.
        patience: stop once the held-out score has not risen for so many scores; the last round's params are kept.
        progress: a progress bar; None: where standard error is a terminal.

    Raises:
        ValueError: bad data, a cohort larger than the federation, a device that is not there, a checkpoint of another run.
        ProgramError: a model or guide that cannot be run as it is written.
        ClientError: what a client sends is not finite.
    """
    if patience is not None and held_out is None:
        raise ValueError("patience needs rows to score: give held_out=")
    if min(rounds, every, score_every) < 1:
        raise ValueError(
            f"rounds ({rounds}), every ({every}) and score_every ({score_every}) must be 1 or more"
        )
    federation = federate(
        method, data, seed=seed, cohort=cohort, engine=engine, chunk=chunk, device=device
    )
    if held_out is not None:
        data.index(held_out.names)  # an unknown client is found now, not at the first score
    where = begin(federation, None if checkpoint is None else Path(checkpoint))
    who = about(method, federation, rounds)
    if checkpoint is not None and state.checkpoints(checkpoint):
        if not resume:
            raise ValueError(
                f"'{checkpoint}' holds a run already: go on with it by resume=True, or name another folder"
            )
        where = state.load(checkpoint, where, who)
    compiled = where.compiled if where.round else _compiles(compile, engine, federation, rounds)
    federation, where = (
        replace(federation, graphs=Graphs() if compiled else None),
        replace(where, compiled=compiled),
    )
    best, since = _best(where, patience)

    def over(where: Progress) -> bool:
        return federation.server.finished(where.server) or (
            patience is not None and since >= patience
        )

    until = (
        where.round if where.round and over(where) else rounds
    )  # a run that had stopped stays as it was
    steps = (
        pooled_rounds(method, federation, where, until)
        if engine == "pooled"
        else run_rounds(federation, where, until)
    )
    with _bar(progress, method.name, where.round, rounds) as tick:
        for where in steps:
            if held_out is not None and where.round % score_every == 0:
                score = _score(Fit(method, federation, where, rounds), held_out)
                where.history[-1]["held_out_log_score"] = score
                best, since = (score, 0) if score > best else (best, since + 1)
            tick(where)
            stop = over(where)
            if checkpoint is not None and (
                where.round % every == 0 or where.round == rounds or stop
            ):
                state.save(checkpoint, where, who)
            if stop:
                break
    return Fit(method, federation, where, rounds)


def _compiles(compile: str | bool, engine: str, federation: Federation, rounds: int) -> bool:
    if compile not in ("auto", True, False):
        raise ValueError(f"compile is {compile!r}: True, False or 'auto'")
    if engine != "vectorised":
        return False
    return worth_compiling(federation, rounds) if compile == "auto" else bool(compile)


def _score(fitted: Fit, held_out: ClientData) -> float:
    """Mean over rows of the log score, summed over the sites that are observed a row."""
    total = 0.0
    for site in fitted.program.sites_of_rows:
        scores = fitted.predict(held_out, site=site, draws=50).log_score
        if scores is None:
            raise ValueError(f"held_out has no labels for site '{site}': nothing to score")
        total += float(scores.mean())
    return total


def _best(where: Progress, patience: int | None) -> tuple[float, int]:
    """Best held-out score so far, and scores since: early stopping goes on where a resumed run left off."""
    scores = [
        record["held_out_log_score"] for record in where.history if "held_out_log_score" in record
    ]
    if not scores or patience is None:
        return float("-inf"), 0
    return max(scores), len(scores) - 1 - scores.index(max(scores))


@contextmanager
def _bar(show: bool | None, name: str, done: int, total: int) -> Iterator[Any]:
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda where: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Bar(*columns) as bar:
        task = bar.add_task(name, total=total, completed=done, last="")

        def tick(where: Progress) -> None:
            last = ", ".join(
                f"{k} {v:.3g}"
                for k, v in where.history[-1].items()
                if k in ("elbo", "loss", "held_out_log_score")
            )
            bar.update(task, completed=where.round, last=last)

        yield tick


def load(
    folder: str | Path, *, method: Method | None = None, data: ClientData | None = None
) -> Fit:
    """Read a fit that `Fit.save`, or a checkpoint of `fit`, has written.

    Args:
        folder: of the fit or the run.
        method: what was fitted; None: made again from its record, for methods, models and guides of hierfl and functions of
            modules that are imported already.
        data: the clients' training rows; None: those saved with it.

    Raises:
        CheckpointError: no whole checkpoint is there, or it is of another method or other clients.
        CannotRemake: the method cannot be made again: hand it in.
        FileNotFoundError: the rows were not saved: hand them in.
    """
    root = Path(folder)
    found = state.checkpoints(root)
    if not found:
        raise state.CheckpointError(f"'{folder}' holds no hierfl run")
    who = saved.newest_record(found)["about"]
    data = saved.read_rows(root) if data is None else data
    method = remake(who["method"]) if method is None else method
    federation = federate(method, data, seed=who["seed"])
    same = {
        key: value
        for key, value in about(method, federation, who["rounds"]).items()
        if key in ("clients", "rows", "fields")
    }
    progress = state.load(root, begin(federation, root), same)
    return Fit(method, federation, progress, who["rounds"])
