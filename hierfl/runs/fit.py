"""`fit`, which runs a method on the data of a federation."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import Federation, federate
from hierfl.engine.pooled import pooled_rounds
from hierfl.engine.rounds import Progress, begin, left_out_of
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.engine.worth_compiling import worth_compiling
from hierfl.method import Method
from hierfl.program.check_scale import warn_of_unscaled
from hierfl.runs import checkpoint as state
from hierfl.runs.check_arguments import check_kinds
from hierfl.runs.folder_lock import held
from hierfl.runs.identity import about
from hierfl.runs.least_rows import with_rows
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import clear

SCORE = "held_out_log_score"  # its name in the history


@one_at_a_time
def fit(
    method: Method,
    data: ClientData,
    *,
    rounds: int | None = None,
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
    on_client_error: Literal["raise", "skip"] = "raise",
    least_rows: int = 1,
) -> Fit:
    """Fit a method to the data of a federation.

    Args:
        method: from `hierfl.methods`, or one's own `Method`.
        data: the clients' training rows.
        rounds: exchanges between server and clients, at most: a method that stops by itself may take fewer.
            None: until the method stops by itself, after `method.most_rounds` at the latest, which is the same
            run as with that number; other methods need a number.
        seed: of everything random. Noise is a function of (seed, client, step, site), so no result depends on
            the engine or on the order of clients.
        cohort: clients a round: None for all, a count, or a share in (0, 1].
        engine: "vectorised" carries many clients at once; "sequential" runs one after another; "pooled" runs
            all in one Pyro plate, as if the rows had been brought together, for methods that have such a
            form. All give the same numbers.
        chunk: clients carried at once by "vectorised"; None: as many as fit the cache.
        compile: whether each kind of local step becomes one compiled graph, whose numbers agree with eager
            ones to rounding. "auto" compiles where the run is long enough to repay it, judged by the seconds
            of one eager step and the number of its operations; of a method that stops by itself the rounds count
            that it is likely to take. A resumed run does as the run before it did. From the second round on,
            chunks of a compiled run are shared among as many processes as `torch.get_num_threads()`, this one
            and copies of it (on Linux; elsewhere this process does everything).
        device: where clients work, such as "cuda"; the server, the client states and the returned fit stay on
            the CPU.
        checkpoint: folder to write checkpoints to.
        every: rounds between checkpoints; the last round is always written.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        held_out: labelled rows of the same clients; their mean log score is logged every `score_every`
            rounds.
        score_every: rounds between scores.
        patience: stop once so many scores in a row have not improved on the best; the params of the last
            round are kept.
        progress: show a progress bar; None: where standard error is a terminal.
        on_client_error: "raise" stops the run at a client that fails, or whose update is not finite. "skip"
            leaves such a client out of that round: it is not counted, its client state stays as it was, and
            `history["left_out"]` and the report name it with the reason. A round without any client left
            stops the run. With either, `history["far_out"]` names updates of at least ten times the median
            norm that are far out of the cohort's spread (`hierfl.engine.bad_updates`); these are counted.
        least_rows: clients with fewer rows take no part, and send nothing; a warning names them. The fit is of
            the others, and `Fit.personalise` infers the client states of those left out from their own rows. What
            a client with few rows sends tells much about each (docs/privacy.md).

    Raises:
        TypeError: an argument is of another kind, such as a frame for `data`.
        ValueError: bad data, a cohort larger than the federation, a device that is not available, a
            checkpoint of another run, or `rounds` is None and the method does not stop by itself.
        ProgramError: a model or guide that cannot be run as it is written.
        KeyError: `held_out` has a client that `data` does not have.
        ClientError: a client fails, or its update is not finite; with on_client_error="skip", all clients of a
            round.
    """
    counts: dict[str, object] = {"rounds": rounds, "every": every, "score_every": score_every}
    counts |= {"seed": seed, "cohort": cohort, "chunk": chunk, "patience": patience}
    check_kinds(method, data, held_out, counts | {"least_rows": least_rows})
    data, held_out = with_rows(data, held_out, least_rows)
    planned = _planned(method, rounds)
    _check(planned, every, score_every, compile, patience, held_out, data)
    eager = federate(
        method,
        data,
        seed=seed,
        cohort=cohort,
        engine=engine,
        chunk=chunk,
        device=device,
        on_client_error=on_client_error,
    )
    _check_scored(eager, held_out)
    warn_of_unscaled(eager.program, data)
    run = about(method, eager, planned)
    folder = None if checkpoint is None else Path(checkpoint)
    with nullcontext() if folder is None else held(folder):
        where = _resumed(folder, eager, run, resume) or begin(
            eager, folder, compiled=_compiles(compile, method, eager, planned)
        )
        federation = replace(eager, graphs=Graphs()) if where.compiled else eager
        fitted = Fit(method, federation, where, planned)
        left = _each_round(fitted, held_out, score_every, patience)
        with _bar(progress, method.name, where.round, rounds) as tick, closing(left):
            for fitted in left:
                tick(where := fitted.progress)
                last = where.round == planned or _is_over(fitted, patience)
                if folder and (where.round % every == 0 or last):
                    state.save(folder, where, run)
    return fitted


def _planned(method: Method, rounds: int | None) -> int:
    """Return how many rounds a run may take."""
    if rounds is not None:
        return rounds
    if method.most_rounds is None:
        raise ValueError(
            f"rounds is None, and method '{method.name}' does not stop by itself: say how many, rounds=100"
        )
    return method.most_rounds


def _check_scored(federation: Federation, held_out: ClientData | None) -> None:
    """Refuse held-out rows where the model has no site whose rows could be scored."""
    if held_out is not None and not federation.program.sites_of_rows:
        federation.program.observed_site(None)


def _each_round(
    fitted: Fit, held_out: ClientData | None, score_every: int, patience: int | None
) -> Generator[Fit, None, None]:
    """Run the rounds that are left, and yield the fit after each; worker processes end with the last."""
    # a run that had stopped before it was resumed stays as it was
    over = fitted.progress.round and _is_over(fitted, patience)
    until = fitted.progress.round if over else fitted.rounds
    federation, begun = fitted.federation, fitted.progress
    if federation.engine == "pooled":
        each_round = pooled_rounds(fitted.method, federation, begun, until)
    else:
        each_round = run_rounds(federation, begun, until)
    with closing(each_round):
        for where in each_round:
            fitted = replace(fitted, progress=where)
            if held_out is not None and where.round % score_every == 0:
                where.history[-1][SCORE] = _score(fitted, held_out)
            yield fitted
            if _is_over(fitted, patience):
                return


def _is_over(fitted: Fit, patience: int | None) -> bool:
    """Return whether a run ends before its last round: the server has finished, or scores no longer rise."""
    where = fitted.progress
    tired = patience is not None and _scores_without_gain(where.history) >= patience
    return fitted.federation.server.finished(where.server) or tired


def _check(
    rounds: int,
    every: int,
    score_every: int,
    compile: object,
    patience: int | None,
    held_out: ClientData | None,
    data: ClientData,
) -> None:
    """Refuse bad arguments of `fit` before any work is done."""
    if patience is not None and held_out is None:
        raise ValueError("patience needs rows to score: pass held_out=")
    if min(rounds, every, score_every) < 1:
        raise ValueError(
            f"rounds ({rounds}), every ({every}) and score_every ({score_every}) must be 1 or more"
        )
    if compile not in ("auto", True, False):
        raise ValueError(f"compile is {compile!r}: it must be True, False or 'auto'")
    if held_out is not None:
        data.index(held_out.names)  # refuses unknown clients now, not at the first score


def _compiles(compile: str | bool, method: Method, federation: Federation, rounds: int) -> bool:
    """Return whether a new run compiles its local steps."""
    if federation.engine != "vectorised":
        return False
    if compile != "auto":
        return bool(compile)
    return worth_compiling(federation, rounds, method.most_rounds)


def _resumed(
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


def _score(fitted: Fit, held_out: ClientData) -> float:
    """Return the mean over rows of the log score, summed over the sites that are observed a row."""
    total = 0.0
    for site in fitted.program.sites_of_rows or (fitted.program.observed_site(None),):
        scores = fitted.predict(held_out, site=site, draws=50).log_score
        if scores is None:
            raise ValueError(f"held_out has no labels for site '{site}': nothing to score")
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
def _bar(show: bool | None, name: str, done: int, total: int | None) -> Iterator[Any]:
    """Show a progress bar, and yield a function that moves it to where a run stands.

    Args:
        show: whether to; None: where standard error is a terminal.
        name: of the method.
        done: rounds done.
        total: rounds of the run; None: it stops by itself, and nobody knows when.
    """
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
                f"{k} {v:.3g}" for k, v in where.history[-1].items() if k in ("elbo", "loss", SCORE)
            )
            skipped = left_out_of(where.history)
            last += f"{', ' if last else ''}{skipped} skipped" if skipped else ""
            bar.update(task, completed=where.round, last=last)

        yield tick
