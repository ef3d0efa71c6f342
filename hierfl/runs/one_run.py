"""One run of a method: its rounds, checkpoints, held-out scores and progress bar."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hierfl.data.clients import ClientData
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import Federation, federate
from hierfl.engine.pooled import pooled_rounds
from hierfl.engine.rounds import CHOSEN, Progress, begin, left_out_of
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.engine.settling import settle
from hierfl.engine.worth_compiling import worth_compiling
from hierfl.method import Method
from hierfl.program.check_scale import warn_of_unscaled
from hierfl.runs import checkpoint as state
from hierfl.runs.folder_lock import held
from hierfl.runs.identity import about
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import clear

SCORE = "validation_log_score"  # its name in the history


@dataclass(frozen=True, eq=False)
class How:
    """How `hierfl.fit` was asked to run; the fields are its arguments.

    Args:
        seed: of everything random.
        cohort: clients a round.
        engine: "vectorized", "sequential" or "pooled".
        chunk: clients carried at once.
        compile: whether local steps are compiled.
        device: where clients work.
        checkpoint: folder to write checkpoints to.
        checkpoint_every: rounds between checkpoints.
        resume: continue from the newest checkpoint.
        validation: labeled rows to score.
        eval_every: rounds between scores.
        patience: scores in a row without a gain before the run stops.
        progress: show a progress bar; None: where standard error is a terminal.
        callback: called with the fit after each round.
        on_client_error: "raise" or "skip".
    """

    seed: int
    cohort: int | float | None
    engine: Literal["vectorized", "sequential", "pooled"]
    chunk: int | None
    compile: Literal["auto"] | bool
    device: str | torch.device
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    validation: ClientData | None
    eval_every: int
    patience: int | None
    progress: bool | None
    callback: Callable[[Fit], object] | None
    on_client_error: Literal["raise", "skip"]

    @property
    def shown(self) -> bool:
        """Whether progress is shown."""
        return sys.stderr.isatty() if self.progress is None else self.progress


def run(
    method: Method, data: ClientData, rounds: int | None, how: How, *, chosen: str | None = None
) -> Fit:
    """Run a method on the data of a federation.

    Args:
        method: to run.
        data: the clients' training rows.
        rounds: as in `hierfl.fit`.
        how: the other arguments of `hierfl.fit`.
        chosen: which method was chosen and why, for the history; None: the user named the method.

    Raises:
        ValueError, ProgramError, KeyError, ClientError: as `hierfl.fit`.
    """
    planned = planned_of(method, rounds)
    _check(planned, how, data)
    eager = federate(
        method,
        data,
        seed=how.seed,
        cohort=how.cohort,
        engine=how.engine,
        chunk=how.chunk,
        device=how.device,
        on_client_error=how.on_client_error,
    )
    _check_scored(eager, how.validation)
    warn_of_unscaled(eager.program, data)
    who = about(method, eager, planned)
    folder = how.checkpoint
    with nullcontext() if folder is None else held(folder):
        where = resumed(folder, eager, who, how.resume) or begin(
            eager, folder, compiled=_compiles(how.compile, method, eager, planned)
        )
        federation = replace(eager, graphs=Graphs()) if where.compiled else eager
        fitted = Fit(method, federation, where, planned)
        left = _each_round(fitted, how)
        with _bar(how.shown, method.name, where.round, rounds) as tick, closing(left):
            for fitted in left:
                tick(where := fitted.progress)
                if chosen is not None and where.round == 1:
                    where.history[0][CHOSEN] = chosen
                last = where.round == planned or is_over(fitted, how.patience)
                kept = folder is not None and where.round % how.checkpoint_every == 0
                if last or kept or how.callback is not None:
                    settle(federation, fitted.message, where.table)
                if folder and (last or kept):
                    state.save(folder, where, who)
                if how.callback is not None:
                    how.callback(fitted)
    return fitted


def planned_of(method: Method, rounds: int | None) -> int:
    """Return how many rounds a run may take."""
    if rounds is not None:
        return rounds
    if method.most_rounds is None:
        raise ValueError(
            f"rounds is None, and method '{method.name}' does not stop by itself: say how many, rounds=100"
        )
    return method.most_rounds


def _check_scored(federation: Federation, validation: ClientData | None) -> None:
    """Refuse held-out rows where the model has no site whose rows could be scored."""
    if validation is not None and not federation.program.sites_of_rows:
        federation.program.observed_site(None)


def _each_round(fitted: Fit, how: How) -> Generator[Fit, None, None]:
    """Run the rounds that are left, and yield the fit after each; worker processes end with the last."""
    # a run that had stopped before it was resumed stays as it was
    over = fitted.progress.round and is_over(fitted, how.patience)
    until = fitted.progress.round if over else fitted.rounds
    federation, begun = fitted.federation, fitted.progress
    if federation.engine == "pooled":
        each_round = pooled_rounds(fitted.method, federation, begun, until)
    else:
        each_round = run_rounds(federation, begun, until)
    with closing(each_round):
        for where in each_round:
            fitted = replace(fitted, progress=where)
            if how.validation is not None and where.round % how.eval_every == 0:
                settle(federation, fitted.message, where.table)
                where.history[-1][SCORE] = _score(fitted, how.validation)
            yield fitted
            if is_over(fitted, how.patience):
                return


def is_over(fitted: Fit, patience: int | None) -> bool:
    """Return whether a run ends before its last round: the server has finished, or scores no longer rise."""
    where = fitted.progress
    tired = patience is not None and _scores_without_gain(where.history) >= patience
    return fitted.federation.server.finished(where.server) or tired


def _check(rounds: int, how: How, data: ClientData) -> None:
    """Refuse bad arguments of `fit` before any work is done."""
    if how.patience is not None and how.validation is None:
        raise ValueError("patience needs rows to score: pass validation=")
    if min(rounds, how.checkpoint_every, how.eval_every) < 1:
        raise ValueError(
            f"rounds ({rounds}), checkpoint_every ({how.checkpoint_every}) and eval_every "
            f"({how.eval_every}) must be 1 or more"
        )
    if how.compile not in ("auto", True, False):
        raise ValueError(f"compile is {how.compile!r}: it must be True, False or 'auto'")
    if how.validation is not None:
        data.index(how.validation.names)  # refuses unknown clients now, not at the first score


def _compiles(compile: str | bool, method: Method, federation: Federation, rounds: int) -> bool:
    """Return whether a new run compiles its local steps."""
    if federation.engine != "vectorized":
        return False
    if compile is True and any(phase.eager for phase in federation.client.phases):
        warnings.warn(
            f"compile is True, and local steps of '{method.name}' cannot be compiled: they run eagerly, which "
            f"gives the same numbers; leave compile= out",
            stacklevel=2,
        )
        return False
    if compile != "auto":
        return bool(compile)
    return worth_compiling(federation, rounds, method.most_rounds)


def resumed(
    folder: Path | None, federation: Federation, run: Mapping[str, Any], resume: bool
) -> Progress | None:
    """Return the progress of the run in a folder, whose lock is held; None where there is no run yet."""
    if folder is None:
        return None
    clear(folder)  # of what a killed process has left half done
    if not state.checkpoints(folder):
        return None
    if not resume:
        raise ValueError(
            f"'{folder}' already holds a run: continue it with resume=True, or name another folder"
        )
    return state.load(folder, begin(federation, folder), run)


def _score(fitted: Fit, validation: ClientData) -> float:
    """Return the mean over rows of the log score, summed over the sites that are observed a row."""
    total = 0.0
    for site in fitted.program.sites_of_rows or (fitted.program.observed_site(None),):
        scores = fitted.predict(validation, site=site, draws=50).log_score
        if scores is None:
            raise ValueError(f"validation has no labels for site '{site}': nothing to score")
        total += float(scores.mean())
    return total


def _scores_without_gain(history: Iterable[Mapping[str, Any]]) -> int:
    """Return how many held-out scores in a row, up to the last, have not improved on the best before them."""
    best, since = float("-inf"), 0
    for record in history:
        if SCORE in record:
            best, since = (record[SCORE], 0) if record[SCORE] > best else (best, since + 1)
    return since


@contextmanager
def _bar(show: bool, name: str, done: int, total: int | None) -> Iterator[Any]:
    """Show a progress bar, and yield a function that moves it to where a run stands.

    Args:
        show: whether to.
        name: of the method.
        done: rounds done.
        total: rounds of the run; None: it stops by itself, and nobody knows when.
    """
    if not show:
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
                f"{k} {v:.3g}" for k, v in where.history[-1].items() if k in ("elbo", "loss", SCORE)
            )
            skipped = left_out_of(where.history)
            last += f"{', ' if last else ''}{skipped} skipped" if skipped else ""
            bar.update(task, completed=where.round, last=last)

        yield tick
