"""A run of a chosen method: until it stops itself, is good, or more rounds will not help."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hierfl import guides, methods
from hierfl.core.importance_sampling import K_HAT
from hierfl.data.clients import ClientData
from hierfl.diagnostics.check import LEAST_EFFECTIVE
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.diagnostics.trend import course_of
from hierfl.methods.stages.checks import Misread
from hierfl.posterior.snapshot import learned_params
from hierfl.runs import checkpoint as state
from hierfl.runs.call import FitArguments
from hierfl.runs.choice import Choice
from hierfl.runs.ended import NoGain
from hierfl.runs.one_run import is_over, repeat_warnings, run
from hierfl.runs.records import about
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import discard, held

# Rounds of the attempts, each from scratch: the fit is that of its `rounds`. radon needs 550.
ATTEMPTS = (200, 600, 2000)
DRAWS = 64  # for the gradient at the end
WORK = 1e8  # rows x unknowns above which the last gradient is not estimated: it takes minutes


def run_chosen(choice: Choice, data: ClientData, call: FitArguments) -> Fit:
    """Run a chosen method, until it stops itself or its posterior is good where rounds is None."""
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
            print(f"hierfl.fit goes over to {why}", file=sys.stderr)
        other = Choice(methods.fedsvi(method.model, guides.structured), why, None)
        return _until_good(other, data, call, ATTEMPTS)
    if method.most_rounds is None:
        return _with_verdict(fitted, _judged(fitted, _draws(fitted), call.seed))
    return fitted


def _until_good(
    choice: Choice, data: ClientData, call: FitArguments, attempts: Sequence[int]
) -> Fit:
    """Run a method for more and more rounds, until it is good or more rounds will not help."""
    done = _recorded(call.checkpoint) if call.resume else 0
    remaining = [rounds for rounds in attempts if rounds >= done] or [attempts[-1]]
    for rounds in remaining:
        fitted = run(choice.method, data, replace(call, rounds=rounds), choice)
        draws = _draws(fitted)
        judgment = _judged(fitted, draws, call.seed)
        stopped = fitted.progress.round < rounds and is_over(fitted, call.patience)
        if stopped or judgment.converged or rounds == remaining[-1]:
            break
        if course_of(fitted, draws=draws, seed=call.seed).state == "level":
            break  # more rounds will not help
        if call.progress:
            print(f"{rounds} rounds are not enough: {judgment.verdict}", file=sys.stderr)
        if call.checkpoint is not None:  # so that the next attempt can begin
            who = about(fitted.method, fitted.federation, fitted.rounds)
            with held(call.checkpoint):
                discard(call.checkpoint, partial(state.is_of_run, about=who))
    _warn(fitted, judgment)
    return _with_verdict(fitted, judgment)


def _warn(fitted: Fit, judgment: Convergence) -> None:
    """Say what makes the posterior of a chosen method one not to trust."""
    why = [] if judgment.converged else [judgment.verdict]
    learned = [spec.name for spec in learned_params(fitted)]
    if learned and fitted.program.latents.sites:
        why.append(
            f"Param '{learned[0]}' is learned as a point, whose uncertainty no interval includes: "
            f"give it a prior, pyro.sample('{learned[0]}', ...)."
        )
    if why:
        warnings.warn(f"the posterior is not one to trust. {' '.join(why)}", stacklevel=5)


def _judged(fitted: Fit, draws: int, seed: int) -> Convergence:
    """Judge a run; by fewer weighted draws where they are computed one after another."""
    proposals = 1000 if fitted.program.in_vmap else 100
    return convergence(fitted, draws=draws, seed=seed, proposals=proposals)


def _draws(fitted: Fit) -> int:
    """Return how many draws estimate the last gradient: none where they would take minutes."""
    latents = fitted.program.latents
    size = latents.global_block.size + latents.local_block.size
    return 0 if size * fitted.federation.data.num_rows > WORK else DRAWS


def _with_verdict(fitted: Fit, judgment: Convergence) -> Fit:
    corrected = judgment.k_hat < K_HAT and judgment.effective >= LEAST_EFFECTIVE
    where = replace(fitted.progress, verdict=judgment.verdict, corrected=corrected)
    return replace(fitted, progress=where)


def _recorded(folder: Path | None) -> int:
    """Return the rounds planned by the newest readable run in a folder; 0: there is none."""
    for path in reversed(state.checkpoints(folder) if folder is not None else []):
        try:
            return state.read_record(path).about["rounds"]
        except state.CheckpointError:
            continue
    return 0
