"""`fit`, which runs a method, or one that it chooses, until it stops, is good, or more rounds will not help."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hierfl import guides, methods
from hierfl.core.arguments import expect_path, spelled
from hierfl.core.importance_sampling import K_HAT
from hierfl.core.process import one_at_a_time
from hierfl.core.user_warnings import warn
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.diagnostics.check import LEAST_EFFECTIVE
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.diagnostics.trend import course_of
from hierfl.engine.federation import Settings
from hierfl.method import Method
from hierfl.methods.stages.checks import Misread
from hierfl.posterior.corrected import corrected
from hierfl.posterior.snapshot import learned_params
from hierfl.program.global_labels import GlobalLabels
from hierfl.program.sites import Model
from hierfl.runs import checkpoint as state
from hierfl.runs.call import FitArguments, check_method, with_rows
from hierfl.runs.choice import Choice, choose, too_much
from hierfl.runs.ended import NoGain
from hierfl.runs.one_run import is_over, repeat_warnings, run
from hierfl.runs.records import about
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import discard, held

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames


# Rounds of the attempts, each from scratch: the fit is that of its `rounds`. radon needs 550.
ATTEMPTS = (200, 600, 2000)
DRAWS = 64  # for the gradient at the end
WORK = 1e8  # rows x unknowns above which the last gradient is not estimated: it takes minutes


def run_chosen(choice: Choice, data: ClientData, call: FitArguments) -> Fit:
    """Run a chosen method; if rounds is None, until it stops or its posterior is good."""
    method = choice.method
    repeat_warnings(choice.caught)
    if call.progress:
        print(f"hierfl.fit chose {choice.why}", file=sys.stderr)
        if call.rounds is None and method.most_rounds is None:
            first, *longer = ATTEMPTS
            print(f"{first} rounds, and {longer[0]} or {longer[1]} where needed", file=sys.stderr)
    if call.rounds is None and method.most_rounds is None:
        return _until_good(choice, data, call, ATTEMPTS)
    try:
        fitted = run(method, data, call, choice)
    except (NoGain, Misread) as error:
        why = f"fedsvi, since {str(error).partition(', so that')[0]}"
        if call.progress:
            print(f"hierfl.fit switches to {why}", file=sys.stderr)
        other = Choice(methods.fedsvi(method.model, guides.structured), why, None)
        return _until_good(other, data, call, ATTEMPTS)
    if method.most_rounds is None:
        return _with_verdict(fitted, _judged(fitted, call.seed), call.seed)[0]
    return fitted


def _until_good(
    choice: Choice, data: ClientData, call: FitArguments, attempts: Sequence[int]
) -> Fit:
    """Run a method for more and more rounds, until it is good or more rounds will not help."""
    done = _recorded(call.checkpoint) if call.resume else 0
    remaining = [rounds for rounds in attempts if rounds >= done] or [attempts[-1]]
    for rounds in remaining:
        fitted = run(choice.method, data, replace(call, rounds=rounds), choice)
        judgment = _judged(fitted, call.seed)
        stopped = fitted.progress.round < rounds and is_over(fitted, call.patience)
        if stopped or judgment.converged or rounds == remaining[-1]:
            break
        if course_of(fitted, draws=_draws(fitted), seed=call.seed).state == "level":
            break  # more rounds will not help
        if call.progress:
            print(f"{rounds} rounds are not enough: {judgment.verdict}", file=sys.stderr)
        if call.checkpoint is not None:  # so that the next attempt can begin
            who = about(fitted.method, fitted.federation, fitted.rounds)
            with held(call.checkpoint):
                discard(call.checkpoint, partial(state.is_of_run, about=who))
    fitted, judgment = _with_verdict(fitted, judgment, call.seed)
    _warn(fitted, judgment)
    return fitted


def _warn(fitted: Fit, judgment: Convergence) -> None:
    """Say what makes the posterior of a chosen method one not to trust."""
    why = [] if judgment.converged else [judgment.verdict]
    learned = [spec.name for spec in learned_params(fitted)]
    if learned and fitted.program.latents.sites:
        why.append(
            f"Param '{learned[0]}' is learned as a point, so no interval includes its uncertainty: "
            f"give it a prior, pyro.sample('{learned[0]}', ...)."
        )
    if why:
        warn(f"do not trust the posterior. {' '.join(why)}")


def _judged(fitted: Fit, seed: int) -> Convergence:
    """Judge a run; by fewer weighted draws where they are computed one after another."""
    proposals = 1000 if fitted.program.in_vmap else 100
    return convergence(fitted, draws=_draws(fitted), seed=seed, proposals=proposals)


def _draws(fitted: Fit) -> int:
    """Return how many draws estimate the last gradient: none where they would take minutes."""
    latents = fitted.program.latents
    size = latents.global_block.size + latents.local_block.size
    return 0 if size * fitted.federation.data.num_rows > WORK else DRAWS


def _with_verdict(fitted: Fit, judgment: Convergence, seed: int) -> tuple[Fit, Convergence]:
    """Correct draws by weights that can be trusted; of a guide that is off, judge them again."""
    usable = judgment.k_hat < K_HAT and judgment.effective >= LEAST_EFFECTIVE
    if usable and not judgment.converged:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the verdict says what they would
            usable = corrected(fitted).k_hat < K_HAT
    fitted = replace(fitted, progress=replace(fitted.progress, corrected=usable))
    if usable and not judgment.converged:
        judgment = _judged(fitted, seed)
    return replace(fitted, progress=replace(fitted.progress, verdict=judgment.verdict)), judgment


def _recorded(folder: Path | None) -> int:
    """Return the rounds planned by the newest readable run in a folder; 0: there is none."""
    for path in reversed(state.checkpoints(folder) if folder is not None else []):
        try:
            return state.read_record(path).about["rounds"]
        except state.CheckpointError:
            continue
    return 0


@spelled
@one_at_a_time
def fit(
    model: Method | Model,
    data: "ClientData | Frames",
    *,
    clients: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    validation: "ClientData | Frames | None" = None,
    eval_every: int = 10,
    patience: int | None = None,
    time_limit: float | None = None,
    callback: Callable[[Fit], object] | None = None,
    progress: bool | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> Fit:
    """Fit a model, or a method, to the data of a federation.

    Args:
        model: a function of a `ClientBatch`, or a `hierfl.formula`. The rule in docs/methods.md
            chooses its method, and `Fit.chosen` says which and why. A chosen method that does not
            stop automatically runs for 200 rounds; if `hierfl.diagnostics.convergence` asks for
            more, it runs again from scratch for 600, then 2,000 rounds. `Fit.posterior` corrects
            its draws by importance weights if these can be trusted. Or a method: one of
            `hierfl.methods`, or a `Method` of your own.
        data: the clients' training rows; or one frame with a column that names the clients; for a
            formula also {client: frame}.
        clients: the column of a frame that names the clients. A program reads every other column as
            a field, `batch.age`. A formula names its own column of clients. Default None.
        rounds: the most exchanges between server and clients. A method that stops automatically may
            take fewer. None: until the method stops, after `method.most_rounds` at the latest (the
            same run as with that number). A named method that does not stop automatically needs a
            number.
        seed: determines all randomness. Noise is a function of (seed, client, step, site), so no
            result depends on the engine or on the order of clients.
        cohort: clients per round: None for all, a count, or a share in (0, 1].
        checkpoint: folder to write checkpoints to.
        checkpoint_every: rounds between checkpoints; the last round is always written.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        validation: labeled rows of the same clients; their mean log score is logged every
            `eval_every` rounds.
        eval_every: rounds between two scores.
        patience: stop after this many scores in a row without an improvement on the best. The
            params of the last round are kept.
        time_limit: seconds after which rounds end. `two_stage` then switches to Hamiltonian chains
            on all clients' rows, or, if it was chosen and these would take over an hour, to fedsvi
            with `guides.structured`. Other methods stop after the round. Without a limit, a chosen
            `two_stage` switches when further rounds gain nothing; `Fit.summary` says what was done.
            Default None.
        callback: a function of the fit, called after each round, once its checkpoint is written.
            Its result is not used; an error that it raises ends the run.
        progress: say what is done and about how long it takes, and show a progress bar. None: do so
            if standard error is a terminal; otherwise, report progress every ten seconds.
        settings: how the fit is computed, who takes part, and what the server may see.

    Returns:
        The fit. If clients' sites or rows depend on a global discrete site, it is a
        `hierfl.runs.mixed_fit.MixedFit`: a fit for each of up to 64 joint values, with its
        probability and its own folder in `checkpoint`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the data are unusable, the cohort is larger than the federation, the device is
            not available, the checkpoint is of another run, `rounds` is None and the method does
            not stop automatically, or the method discloses more than the settings allow.
        ProgramError: the model or guide cannot be run as it is written.
        KeyError: `validation` has a client that `data` does not have.
        ClientError: a client fails, or its update is not finite; with on_client_error="skip", all
            clients of a round.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    if shown:
        print("hierfl.fit reads the rows and the model", file=sys.stderr)
    read = isinstance(data, ClientData) and isinstance(validation, ClientData | None)
    if not read or clients is not None:
        from hierfl.formulas.formula import of_frames  # with pandas and scipy, 0.8 s

        model, data, validation = of_frames(model, data, validation, clients)
    check_method(model)
    expect_client_data(data, "data")
    call = FitArguments(
        rounds=rounds,
        seed=seed,
        cohort=cohort,
        checkpoint=None if checkpoint is None else expect_path(checkpoint, "checkpoint", "run"),
        checkpoint_every=checkpoint_every,
        resume=resume,
        validation=validation,
        eval_every=eval_every,
        patience=patience,
        callback=callback,
        progress=shown,
        settings=settings,
        time_limit=time_limit,
        lines=progress is not False,
    )
    data, call = with_rows(data, call)
    if isinstance(model, Method):
        if settings.disclose == "sums" and model.discloses == "summaries":
            raise too_much(model, data)
        return run(model, data, call)

    def fit_chosen(model: Model, part: str = "") -> Fit:
        choice = choose(model, data, settings=settings, cohort=cohort, seed=seed)
        folder = call.checkpoint and call.checkpoint / part
        return run_chosen(choice, data, replace(call, checkpoint=folder))

    try:
        return fit_chosen(model)
    except GlobalLabels as labels:
        from hierfl.runs.mixed_fit import mixed_fit  # here: few programs need it

        return mixed_fit(model, labels, fit_chosen)  # type: ignore[return-value]  # few answers lack
