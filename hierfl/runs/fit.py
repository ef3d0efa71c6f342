"""`fit`, which runs a method, or one that it chooses for a model, on the data of a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from hierfl.core.arguments import expect_path
from hierfl.core.one_at_a_time import one_at_a_time
from hierfl.data.clients import ClientData
from hierfl.formulas.frames import Frames, of_frames
from hierfl.method import Method
from hierfl.program.sites import Model
from hierfl.runs.check_arguments import check_kinds
from hierfl.runs.choice import check_disclosed, choose
from hierfl.runs.min_rows import with_rows
from hierfl.runs.one_run import How, run
from hierfl.runs.over_nodes import OverNodes, fit_over
from hierfl.runs.result import Fit
from hierfl.runs.until_good import run_chosen

Found = TypeVar("Found")


@overload
def fit(
    method: Method | Model,
    data: ClientData | Frames,
    *,
    rounds: int | None = ...,
    seed: int = ...,
    cohort: int | float | None = ...,
    engine: Literal["vectorized", "sequential", "pooled"] = ...,
    chunk: int | None = ...,
    compile: Literal["auto"] | bool = ...,
    device: str | torch.device = ...,
    checkpoint: str | Path | None = ...,
    checkpoint_every: int = ...,
    resume: bool = ...,
    validation: ClientData | Frames | None = ...,
    eval_every: int = ...,
    patience: int | None = ...,
    progress: bool | None = ...,
    callback: Callable[[Fit], object] | None = ...,
    on_client_error: Literal["raise", "skip"] = ...,
    min_rows: int = ...,
    disclose: Literal["summaries", "sums"] = ...,
) -> Fit: ...


@overload
def fit(
    method: Method | Model,
    data: None = ...,
    *,
    nodes: OverNodes[Found],
    rounds: int | None = ...,
    seed: int = ...,
    cohort: int | float | None = ...,
    checkpoint: str | Path | None = ...,
    resume: bool = ...,
    disclose: Literal["summaries", "sums"] = ...,
) -> Found: ...


@one_at_a_time
def fit(
    method: Method | Model,
    data: ClientData | Frames | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    cohort: int | float | None = None,
    engine: Literal["vectorized", "sequential", "pooled"] = "vectorized",
    chunk: int | None = None,
    compile: Literal["auto"] | bool = "auto",
    device: str | torch.device = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    validation: ClientData | Frames | None = None,
    eval_every: int = 10,
    patience: int | None = None,
    progress: bool | None = None,
    callback: Callable[[Fit], object] | None = None,
    on_client_error: Literal["raise", "skip"] = "raise",
    min_rows: int = 1,
    disclose: Literal["summaries", "sums"] = "summaries",
    nodes: OverNodes[Any] | None = None,
) -> Any:
    """Fit a method to the data of a federation; for a model in its place, choose the method.

    Args:
        method: from `hierfl.methods`, or one's own `Method`. Or a model: then the method is chosen by the rule in
            docs/methods.md, and `Fit.chosen` says which and why. A chosen method that does not stop by itself runs
            for 200 rounds, and anew for 600 and for 2000 where `hierfl.diagnostics.convergence` asks for more;
            `Fit.posterior` then corrects its draws by importance weights where these can be trusted. A model may
            be a `hierfl.formula`; without a schema, clients first agree on one.
        data: the clients' training rows; of a formula one frame with the column of clients, or {client: frame}.
        rounds: exchanges between server and clients, at most: a method that stops by itself may take fewer.
            None: until the method stops by itself, after `method.most_rounds` at the latest, which is the same
            run as with that number; other methods need a number, unless they are chosen here.
        seed: of everything random. Noise is a function of (seed, client, step, site), so no result depends on
            the engine or on the order of clients.
        cohort: clients a round: None for all, a count, or a share in (0, 1].
        engine: "vectorized" carries many clients at once; "sequential" runs one after another; "pooled" runs
            all in one Pyro plate, as if the rows had been brought together, for methods that have such a
            form. All give the same numbers.
        chunk: clients carried at once by "vectorized"; None: as many as fit the cache.
        compile: whether each kind of local step becomes one compiled graph, whose numbers agree with eager
            ones to rounding. "auto" compiles where the run is long enough to repay it, judged by the seconds
            of one eager step and the number of its operations; of a method that stops by itself the rounds count
            that it is likely to take. A resumed run does as the run before it did. From the second round on,
            chunks of a compiled run are shared among as many processes as `torch.get_num_threads()`, this one
            and copies of it (on Linux; elsewhere this process does everything).
        device: where clients work, such as "cuda"; the server, the client states and the returned fit stay on
            the CPU.
        checkpoint: folder to write checkpoints to.
        checkpoint_every: rounds between checkpoints; the last round is always written.
        resume: continue from the newest undamaged checkpoint of that folder, if there is one.
        validation: labeled rows of the same clients; their mean log score is logged every `eval_every`
            rounds.
        eval_every: rounds between scores.
        patience: stop once so many scores in a row have not improved on the best; the params of the last
            round are kept.
        progress: show a progress bar; None: where standard error is a terminal.
        callback: called with the fit after each round, once its checkpoint is written, such as to measure what
            clients are served then. What it returns is not used; an error that it raises ends the run.
        on_client_error: "raise" stops the run at a client that fails, or whose update is not finite. "skip"
            leaves such a client out of that round: it is not counted, its client state stays as it was, and
            `history["left_out"]` and the report name it with the reason. A round without any client left
            stops the run. With either, `history["far_out"]` names updates of at least ten times the median
            norm that are far out of the cohort's spread (`hierfl.engine.bad_updates`); these are counted.
        min_rows: clients with fewer rows take no part, and send nothing; a warning names them. The fit is of
            the others, and `Fit.personalize` infers the client states of those left out from their own rows. What
            a client with few rows sends tells much about each (docs/privacy.md).
        disclose: what the server may see. "summaries": of each client a summary of its own, as in a
            meta-analysis (`Method.discloses`). "sums": only sums over clients, so that secure aggregation would
            do; a method that needs more is refused, and none is chosen.
        nodes: clients whose rows are on machines of their own, in place of `data`: `hierfl.flower.superlink(...)`, a
            SuperLink whose SuperNodes are asked, or `hierfl.nodes.in_process(...)`. The result is a
            `hierfl.nodes.FitOverNodes`: draws of the global sites are here, and summaries, draws and predictions of
            clients are asked of their nodes. A chosen method that does not stop by itself runs for 200 rounds, and
            whether that is enough is not judged. Only `rounds`, `seed`, `cohort`, `checkpoint`, `resume` and
            `disclose` go with it; a checkpoint is written after each round.

    Returns:
        The fit.

    Raises:
        TypeError: an argument is of another kind, such as a frame for `data`.
        ValueError: bad data, a cohort larger than the federation, a device that is not available, a
            checkpoint of another run, `rounds` is None and the method does not stop by itself, or the method
            discloses summaries and `disclose` is "sums"; or an argument does not go with `nodes`.
        ProgramError: a model or guide that cannot be run as it is written.
        KeyError: `validation` has a client that `data` does not have.
        ClientError: a client fails, or its update is not finite; with on_client_error="skip", all clients of a
            round.
    """
    if nodes is not None:
        return fit_over(nodes, method, locals(), fit)
    method, data, validation = of_frames(method, data, validation)
    counts: dict[str, object] = {
        "rounds": rounds,
        "checkpoint_every": checkpoint_every,
        "eval_every": eval_every,
    }
    counts |= {"seed": seed, "cohort": cohort, "chunk": chunk, "patience": patience}
    check_kinds(method, data, validation, counts | {"min_rows": min_rows})
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is {callback!r}: it must be a function of the fit, or None")
    data, validation = with_rows(data, validation, min_rows)
    how = How(
        seed=seed,
        cohort=cohort,
        engine=engine,
        chunk=chunk,
        compile=compile,
        device=device,
        checkpoint=None if checkpoint is None else expect_path(checkpoint, "checkpoint", "run"),
        checkpoint_every=checkpoint_every,
        resume=resume,
        validation=validation,
        eval_every=eval_every,
        patience=patience,
        progress=progress,
        callback=callback,
        on_client_error=on_client_error,
    )
    if isinstance(method, Method):
        check_disclosed(method, data, disclose)
        return run(method, data, rounds, how)
    choice = choose(
        method,
        data,
        disclose=disclose,
        cohort=cohort,
        engine=engine,
        seed=seed,
        on_client_error=on_client_error,
    )
    return run_chosen(choice, data, rounds, how)
