"""One run of a method: its rounds, checkpoints, validation scores and progress bar."""

import math
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hierfl.core.process import OutOfTime, Watch, watched
from hierfl.core.user_warnings import warn
from hierfl.data.clients import ClientData
from hierfl.engine.chunks import ClientError, NotFinite
from hierfl.engine.compiled import Graphs
from hierfl.engine.federation import Federation, federate
from hierfl.engine.rounds import Progress, begin, settle, times_left_out
from hierfl.engine.rounds import rounds as run_rounds
from hierfl.engine.worth_compiling import worth_compiling
from hierfl.method import Method
from hierfl.methods.stages.two_stage import seen_in
from hierfl.program.labels import warn_of_unscaled
from hierfl.program.sites import recipe_of
from hierfl.runs import checkpoint as state
from hierfl.runs.call import FitArguments, planned_of
from hierfl.runs.choice import Choice
from hierfl.runs.ended import LOOSE, Fallback, expected, in_words, seconds_expected
from hierfl.runs.records import about
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import clear, held

SCORE = "validation_log_score"  # its name in the history


def run(method: Method, data: ClientData, call: FitArguments, choice: Choice | None = None) -> Fit:
    """Run a method on the clients' rows; `choice` is None where the user named the method."""
    planned = planned_of(method, call.rounds)
    if call.validation is not None:
        data.index(call.validation.names)  # refuses unknown clients now, not at the first score
    eager = federate(
        method,
        data,
        seed=call.seed,
        cohort=call.cohort,
        settings=call.settings,
        program=choice.program if choice else None,
    )
    if call.validation is not None and not eager.program.sites_of_rows:
        eager.program.observed_site(None)  # refuses a model without a site whose rows can be scored
    warn_of_unscaled(eager.program, data)
    folder = call.checkpoint
    who = about(method, eager, planned) if folder is not None else {}
    with nullcontext() if folder is None else held(folder):
        where = resumed(folder, eager, who, call.resume) if folder else None
        where = where or begin(eager, folder, compiled=_compiles(method, eager, planned))
        where = where if choice is None else replace(where, chosen=choice.why)
        federation = replace(eager, graphs=Graphs()) if where.compiled else eager
        fitted = Fit(method, federation, where, planned)
        if call.progress and where.round < planned:
            _say(eager, where, call.rounds, planned)
        rounds = _each_round(fitted, call, chosen=choice is not None)
        with _bar(call.progress, method.name, where.round, call.rounds) as tick, closing(rounds):
            for fitted in rounds:
                tick(where := fitted.progress)
                last = where.round == planned or is_over(fitted, call.patience)
                saves = folder is not None and where.round % call.checkpoint_every == 0
                if federation.client.settle and (last or saves or call.callback is not None):
                    settle(federation, fitted.message, where.table)
                if folder and (last or saves):
                    state.save(folder, where, who)
                if call.callback is not None:
                    call.callback(fitted)
    return fitted


def _say(eager: Federation, where: Progress, rounds: int | None, planned: int) -> None:
    """Print what is going to be done, and about how long it takes."""
    usual = eager.server.usual_rounds
    what = expected(eager.method, eager.data, rounds, usual)
    remaining = min(usual or planned, planned) - where.round
    try:
        took = in_words(seconds_expected(eager, where, max(1, remaining)))
    except ClientError:  # the round says so, or goes over to what needs no such numbers
        took = "how long is not known yet"
    print(f"{what}; {took}{' at most' if where.compiled else ''}", file=sys.stderr)


def _each_round(fitted: Fit, call: FitArguments, *, chosen: bool) -> Generator[Fit, None, None]:
    """Run the rounds that are left, and yield the fit after each; workers end with the last."""
    # a run that had stopped before it was resumed stays as it was
    over = fitted.progress.round and is_over(fitted, call.patience)
    until = fitted.progress.round if over else fitted.rounds
    federation, where = fitted.federation, fitted.progress
    fallback = None if over else fallback_of(fitted.method, federation, call, chosen=chosen)
    why = fallback.why_at_once() if fallback is not None and not where.round else None
    watch = Watch(call.line, call.time_limit or math.inf)
    if fallback is not None:
        watch.has_faster = fallback.is_faster
    with closing(run_rounds(federation, where, until)) as each_round:
        while True:
            with _caught(fallback is not None) as caught:
                try:
                    if why is None:
                        where, why = _next(each_round, watch, where, fallback)
                except StopIteration:
                    return
            if fallback is not None:
                if why is None:
                    where = fallback.searched(where)
                    why = fallback.why_over(where)
                if why is not None:
                    yield replace(fitted, progress=fallback.ended(where, why))
                    return
            repeat_warnings(caught)
            if not where.history:
                raise TimeoutError(f"{why}, before the first was done: allow more")
            fitted = replace(fitted, progress=where)
            if call.validation is not None and where.round % call.eval_every == 0:
                settle(federation, fitted.message, where.table)
                where.history[-1][SCORE] = _score(fitted, call.validation)
            yield fitted
            if why is not None or is_over(fitted, call.patience):
                return


@contextmanager
def _caught(catch: bool) -> Iterator[list[warnings.WarningMessage]]:
    """Catch warnings, which chains may make needless; or let them through."""
    if not catch:
        yield []
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _next(
    each_round: Iterator[Progress], watch: Watch, where: Progress, fallback: Fallback | None
) -> tuple[Progress, str | None]:
    """Return the progress after another round, or `where`, and why rounds end if they do."""
    try:
        with watched(watch):
            where = next(each_round)
            watch.look(f"round {where.round}")
    except OutOfTime as over:
        return where, str(over)
    except NotFinite as error:
        if fallback is None:
            raise
        return where, str(error).partition(" (")[0]
    return where, None


def repeat_warnings(caught: Iterable[warnings.WarningMessage]) -> None:
    """Warn again of what was caught."""
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def is_over(fitted: Fit, patience: int | None) -> bool:
    """Return whether a run ends early: the server has finished, or scores no longer rise."""
    where, best, since = fitted.progress, -math.inf, 0
    for score in (record[SCORE] for record in where.history if SCORE in record):
        best, since = (score, 0) if score > best else (best, since + 1)
    tired = patience is not None and since >= patience
    return fitted.federation.server.finished(where.server) or tired


def _compiles(method: Method, federation: Federation, rounds: int) -> bool:
    compile = federation.settings.compile
    if federation.settings.engine != "vectorized":
        return False
    if compile is True and any(phase.eager for phase in federation.client.phases):
        what = f"compile is True, and local steps of '{method.name}' cannot be compiled"
        warn(f"{what}: they run eagerly, which gives the same numbers")
        return False
    if compile != "auto":
        return bool(compile)
    most = method.most_rounds
    return federation.may_compile and worth_compiling(federation, rounds, most)


def resumed(
    folder: Path, federation: Federation, run: Mapping[str, Any], resume: bool
) -> Progress | None:
    """Return the progress of the run in a folder, whose lock is held; None: there is no run yet."""
    clear(folder)  # of what a killed process has left half done
    if not state.checkpoints(folder):
        return None
    if not resume:
        fix = "continue it with resume=True, or name another folder"
        raise ValueError(f"'{folder}' already holds a run: {fix}")
    return state.load(folder, begin(federation, folder), run, grows=federation.server.grows)


def _score(fitted: Fit, validation: ClientData) -> float:
    """Return the mean over rows of the log score, summed over the sites that are observed a row."""
    total = 0.0
    for site in fitted.program.sites_of_rows or (fitted.program.observed_site(None),):
        scores = fitted.predict(validation, site=site, draws=50).log_score
        if scores is None:
            raise ValueError(f"validation has no labels for site '{site}': nothing to score")
        total += float(scores.nanmean())
    return total


@contextmanager
def _bar(show: bool, name: str, done: int, total: int | None) -> Iterator[Any]:
    """Show a bar of `done` of `total` rounds (None: unknown); yield a function that moves it."""
    if not show:
        yield lambda where: None
        return
    begin, end = TextColumn("{task.description}"), TextColumn("{task.fields[last]}")
    columns = (begin, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), end)
    with Bar(*columns, console=Console(force_jupyter=False)) as bar:  # else it asks for ipywidgets
        task = bar.add_task(name, total=total, completed=done, last="")

        def tick(where: Progress) -> None:
            shown = where.history[-1].items()
            last = [f"{k} {v:.3g}" for k, v in shown if k in ("elbo", "loss", SCORE)]
            if "seconds" in where.history[-1]:
                last.append(f"{where.history[-1]['seconds']:.2g} s a round")
            if skipped := times_left_out(where.history):
                last.append(f"{skipped} skipped")
            bar.update(task, completed=where.round, last=", ".join(last))

        yield tick


def fallback_of(
    method: Method, federation: Federation, call: FitArguments, *, chosen: bool
) -> Fallback | None:
    """Return what a run may go over to: of two_stage without row noise, rows in one process."""
    recipe = recipe_of(method)
    if recipe is None or method.name != "two_stage" or not (chosen or call.time_limit):
        return None
    is_whole = federation.cohort == federation.data.num_clients and call.rounds is None
    local = federation.settings.on_client_error != "skip" and federation.settings.device == "cpu"
    seen, data = seen_in(federation.program), federation.data
    # of Gaussian rows their sums suffice; of so few, and in little time, not where the server
    # cannot integrate by itself
    exact = seen.hierarchy.spread is not None
    of_sums = seen.spread is not None and seen.hierarchy.mixing is None
    suffice = data.num_rows > LOOSE * data.num_clients and not call.time_limit
    if not is_whole or not local or exact or (of_sums and suffice):
        return None
    return Fallback(federation, call.line)
