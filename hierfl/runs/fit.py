"""`fit`, which runs a method, or one that it chooses for a model, on the data of a federation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hierfl.core.arguments import expect_path, spelled
from hierfl.core.process import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.engine.settings import Settings
from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.call import FitArguments, check_model, with_rows
from hierfl.runs.choice import choose, too_much
from hierfl.runs.chosen import run_chosen
from hierfl.runs.one_run import run
from hierfl.runs.result import Fit

if TYPE_CHECKING:
    from hierfl.formulas.formula import Frames


@spelled
@one_at_a_time
def fit(
    model: Method | Model,
    data: ClientData | Frames,
    *,
    clients: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    validation: ClientData | Frames | None = None,
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
            stop itself runs for 200 rounds; while `hierfl.diagnostics.convergence` asks for
            more, it runs again from scratch for 600, then 2,000 rounds, and `Fit.posterior`
            corrects its draws by importance weights where these can be trusted. Or a method: one of
            `hierfl.methods`, or one's own `Method`.
        data: the clients' training rows; or one frame with the column of clients; of a formula
            also {client: frame}.
        clients: the column of a frame that names the clients, each other column of which a program
            reads as a field, `batch.age`. A formula names it itself. Default None.
        rounds: exchanges between server and clients, at most: a method that stops itself may
            take fewer. None: until the method stops itself, after `method.most_rounds` at the
            latest, which is the same run as with that number; a named method that does not stop by
            itself needs a number.
        seed: of everything random. Noise is a function of (seed, client, step, site), so no result
            depends on the engine or on the order of clients.
        cohort: clients a round: None for all, a count, or a share in (0, 1].
        checkpoint: folder to write checkpoints to.
        checkpoint_every: rounds between checkpoints; the last round is always written.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        validation: labeled rows of the same clients; their mean log score is logged every
            `eval_every` rounds.
        eval_every: rounds between scores.
        patience: stop once so many scores in a row have not improved on the best; the params of the
            last round are kept.
        time_limit: seconds after which rounds end. `two_stage` then goes over to Hamiltonian chains
            on all clients' rows, or a chosen method to fedsvi with `guides.structured` where these
            would take over an hour; other methods stop after the round. A chosen `two_stage` does
            so without a limit where rounds cease to gain; `Fit.summary` says what was done.
            Default None.
        callback: called with the fit after each round, once its checkpoint is written, such as to
            measure what clients are served then. What it returns is not used; an error that it
            raises ends the run.
        progress: say what is done, about how long it takes, and show a bar of rounds. None: where
            standard error is a terminal; elsewhere a run that takes longer than ten seconds says
            every ten seconds how far it is.
        settings: how the fit is computed, who takes part, and what the server may see.

    Returns:
        The fit.

    Raises:
        TypeError: an argument is of another kind, such as a frame for `data`.
        ValueError: bad data, a cohort larger than the federation, a device that is not available, a
            checkpoint of another run, `rounds` is None and the method does not stop itself, or
            the method discloses more than the settings allow.
        ProgramError: a model or guide that cannot be run as it is written.
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
    check_model(model, data)
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
    choice = choose(model, data, settings=settings, cohort=cohort, seed=seed)
    return run_chosen(choice, data, call)
