"""Kill fits and saves at random moments and resume them.

Run `python -m benchmarks.attacks.kills 200 0`.

A third of the kills come after a random time, which may be between two rounds; the others at a
random operation on the disk, just before it or just after it, so that every place of a save is met.
Fits keep their client states in memory or in a file, and finished fits are saved over one that is
there already.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hierfl
from benchmarks.attacks.forked import (
    Outcome,
    copied,
    digest,
    fast_folder,
    federation,
    in_own_process,
    judged,
    model,
    run,
    run_attack,
)
from hierfl.engine import client_store
from hierfl.runs import checkpoint

# what a save does to the disk: (where it is looked up, name)
OPERATIONS: tuple[tuple[Any, str], ...] = (
    (os, "fsync"),
    (os, "rename"),
    (os, "chmod"),
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (shutil, "rmtree"),
    (checkpoint, "save_file"),
)
CASES = ("fit", "fit with its states in a file", "save", "save with its states in a file")


def attack(n: int = 200, seed: int = 0) -> dict[str, int]:
    """Kill n fits and saves, resume or repeat them, and compare with ones that were left alone.

    Args:
        n: kills.
        seed: of the moments.

    Returns:
        Counts: "right", the final numbers are those of the uninterrupted run, bit for bit;
            "refused", by an
        error of hierfl's own; "wrong", other numbers, or files left behind; "raw", any other error.
    """
    return in_own_process(__name__, n, seed)


def kills(n: int, seed: int) -> dict[str, int]:
    """Do what `attack` promises, in this process, which is copied for every fit."""
    counts = Counter({"right": 0, "refused": 0, "wrong": 0, "raw": 0})
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        root = Path(folder)
        work = {case: _work(case) for case in CASES}
        digest(run(None))  # the first call is slow, and must not be timed
        took, operations, wanted = {}, {}, {}
        for case in CASES:
            began = time.perf_counter()
            wanted[case] = _first(case, root / case, work[case])
            took[case] = time.perf_counter() - began
            operations[case] = _operations(work[case], root / case)
        for k in range(n):
            case, place = CASES[k % len(CASES)], root / str(k)
            if case.startswith("save"):
                shutil.copytree(root / case, place)
            if chance.random() < 1 / 3:
                copy = copied(partial(work[case], place))
                time.sleep(chance.random() * took[case])
                copy.kill()
            else:
                at, after = chance.randrange(operations[case]), chance.random() < 0.5
                copy = copied(partial(_dying, work[case], place, at, after))
            copy.outcome()
            kind = _resumed(case, place, work[case], wanted[case])
            if kind != "right":
                print(f"kill {k} of a {case}: {kind}", file=sys.stderr)
            counts[kind.split(":")[0]] += 1
            shutil.rmtree(place, ignore_errors=True)
    return dict(counts)


def _work(case: str) -> Callable[[Path], str]:
    """Return what is killed, as a function of the folder it writes to."""

    def fits(folder: Path) -> str:
        _set_up(case)
        return digest(run(folder))

    def saves(folder: Path) -> str:
        _set_up(case)
        fitted = run(None)
        fitted.save(folder, with_data=True)
        return digest(fitted)

    return fits if case.startswith("fit") else saves


def _set_up(case: str) -> None:
    """Let client states be kept as the case says."""
    if case.endswith("in a file"):
        client_store.IN_MEMORY = 0


def _loaded(case: str, folder: Path, **options: Any) -> str:
    _set_up(case)
    method = hierfl.methods.fedsvi(model, batch_size=2, local_steps=1)
    return digest(hierfl.load(folder, method=method, **options))


def _first(case: str, folder: Path, work: Callable[[Path], str]) -> str:
    """Do the work of a case once, undisturbed.

    A save finds the fit there already when it is done again.
    """
    done = copied(lambda: work(folder)).outcome()
    if done.kind != "done":
        raise RuntimeError(f"a {case} that nobody kills fails: {done.text}")
    return done.text


def _operations(work: Callable[[Path], str], folder: Path) -> int:
    """Return how many operations on the disk the work of a case takes."""
    place = folder.with_name(f"{folder.name} counted")
    if any(folder.glob("round-*/fit.json")):
        shutil.copytree(folder, place)

    def counted() -> str:
        met = _watched(lambda: None, lambda: None)
        work(place)
        return str(met[0])

    return int(copied(counted).outcome().text)


def _dying(work: Callable[[Path], str], folder: Path, at: int, after: bool) -> str:
    """Do the work of a case, and be killed at one of its operations on the disk."""
    met: list[int] = []

    def die() -> None:
        if met[0] == at + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    met = _watched(nothing if after else die, die if after else nothing)
    return work(folder)


def _watched(before: Callable[[], None], after: Callable[[], None]) -> list[int]:
    """Count the operations on the disk, and call a function before and one after each.

    Return the counter.
    """
    met = [0]

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            met[0] += 1
            before()
            found = operation(*args, **kwargs)
            after()
            return found

        return call

    for module, name in OPERATIONS:
        setattr(module, name, watched(getattr(module, name)))
    return met


def _resumed(case: str, folder: Path, work: Callable[[Path], str], wanted: str) -> str:
    """Judge what is left: a run is resumed; a fit is loaded as it stands, and saved again."""
    if case.startswith("save"):
        loaded = copied(lambda: _loaded(case, folder))
        if (kind := _told(loaded.outcome(), wanted)) != "right":
            return kind
    kind = _told(copied(lambda: work(folder)).outcome(), wanted)
    if kind != "right":
        return kind
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    if left:
        return f"wrong: {left} left"
    again = copied(lambda: _loaded(case, folder, data=federation()))
    return _told(again.outcome(), wanted)


def _told(outcome: Outcome, wanted: str) -> str:
    """Return the judgment of an outcome, and behind it the error if it is one."""
    kind = judged(outcome, {wanted})
    return kind if kind == "right" else f"{kind}: {outcome.text}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attack as the command line says."""
    run_attack(kills, __doc__, arguments)


if __name__ == "__main__":
    main()
