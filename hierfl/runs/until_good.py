"""The run of a chosen method: until it stops itself, or `convergence` finds its posterior good."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hierfl.core.importance_sampling import K_HAT
from hierfl.data.clients import ClientData
from hierfl.diagnostics.convergence import Convergence, convergence
from hierfl.diagnostics.thresholds import LEAST_EFFECTIVE
from hierfl.diagnostics.trend import course_of
from hierfl.engine.rounds import CORRECTED, JUDGED
from hierfl.runs import checkpoint as state
from hierfl.runs.call import Call
from hierfl.runs.choice import Choice
from hierfl.runs.folder_lock import held
from hierfl.runs.identity import about, is_of
from hierfl.runs.one_run import is_over, run
from hierfl.runs.result import Fit
from hierfl.runs.run_folder import discard

# Rounds of the attempts. Each attempt begins from scratch, so that the fit is the one that `fit(method,
# data, rounds=...)` gives, with its step sizes falling over all of its rounds. radon needs 550.
ATTEMPTS = (200, 600, 2000)
DRAWS = 64  # for the gradient at the end
WORK = 1e8  # rows x unknowns above which the last gradient is not estimated: it takes minutes


def run_chosen(choice: Choice, data: ClientData, call: Call) -> Fit:
    """Run a chosen method, until it stops itself or its posterior is good where rounds is None."""
    method = choice.method
    for one in choice.said:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if call.shown:
        print(f"hierfl.fit chose {choice.why}", file=sys.stderr)
    if call.rounds is None and method.most_rounds is None:
        return _until_good(choice, data, call, ATTEMPTS)
    fitted = run(method, data, call, choice)
    if method.most_rounds is None:
        _note(fitted, _judged(fitted, call))
    return fitted


def _until_good(choice: Choice, data: ClientData, call: Call, attempts: Sequence[int]) -> Fit:
    """Run a method for more and more rounds, until it is good or more rounds will not help."""
    done = _recorded(call.checkpoint) if call.resume else 0
    left = [rounds for rounds in attempts if rounds >= done] or [attempts[-1]]
    for rounds in left:
        fitted = run(choice.method, data, replace(call, rounds=rounds), choice)
        found = _judged(fitted, call)
        stopped = fitted.progress.round < rounds and is_over(fitted, call.patience)
        if stopped or found.converged or rounds == left[-1] or _is_level(fitted, call):
            break
        if call.shown:
            print(f"{rounds} rounds are not enough: {found.verdict}", file=sys.stderr)
        if call.checkpoint is not None:
            _clear(call.checkpoint, fitted)
    _note(fitted, found)
    return fitted


def _judged(fitted: Fit, call: Call) -> Convergence:
    """Judge a fit."""
    return convergence(fitted, draws=_draws(fitted), seed=call.seed)


def _is_level(fitted: Fit, call: Call) -> bool:
    """Return whether more rounds will not help."""
    return course_of(fitted, draws=_draws(fitted), seed=call.seed).state == "level"


def _draws(fitted: Fit) -> int:
    """Return how many draws estimate the last gradient: none where they would take minutes."""
    latents = fitted.program.latents
    size = latents.global_block.size + latents.local_block.size
    return 0 if size * fitted.federation.data.num_rows > WORK else DRAWS


def _note(fitted: Fit, found: Convergence) -> None:
    """Write the verdict into the history, and whether draws are corrected by trusted weights."""
    last = fitted.progress.history[-1]
    last[JUDGED] = found.verdict
    if found.k_hat < K_HAT and found.effective >= LEAST_EFFECTIVE:
        last[CORRECTED] = "psis"


def _recorded(folder: Path | None) -> int:
    """Return the rounds planned by the newest readable run in a folder; 0: there is none."""
    for path in reversed(state.checkpoints(folder) if folder is not None else []):
        try:
            return int(state.read_record(path)["about"]["rounds"])
        except state.CheckpointError:
            continue
    return 0


def _clear(folder: Path, fitted: Fit) -> None:
    """Remove the checkpoints of an attempt that was too short, so that the next one can begin."""
    who = about(fitted.method, fitted.federation, fitted.rounds)

    def is_ours(path: Path) -> bool:
        try:
            return is_of(state.read_record(path)["about"], who)
        except state.CheckpointError:
            return False

    with held(folder):
        discard(folder, is_ours)
