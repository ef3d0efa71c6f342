"""Two processes on one folder and two threads in one process.

Run `python -m benchmarks.attacks.together 40 0`.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.attacks.forked import (
    Outcome,
    answered,
    copied,
    digest,
    fast_folder,
    federation,
    in_own_process,
    judged,
    run,
    run_attack,
)

Trial = Callable[[Path, random.Random, dict[str, str]], list[str]]


def attack(n: int = 40, seed: int = 0) -> dict[str, int]:
    """Let two run at once, n times: processes that share a folder, and threads.

    Args:
        n: pairs.
        seed: of who begins by how much.

    Returns:
        Counts, two a pair and one for what the folder holds afterwards: "right", the numbers of one
        that ran alone, bit for bit; "refused", by an error of hierfl's own; "wrong"; "raw", any
        other error.
    """
    return in_own_process(__name__, n, seed)


def pairs(n: int, seed: int) -> dict[str, int]:
    """Do what `attack` promises, in this process, which is copied for every fit."""
    counts = Counter({"right": 0, "refused": 0, "wrong": 0, "raw": 0})
    chance = random.Random(seed)
    fits = {"run": run(None), "other": run(None, seed=4)}
    wanted = {name: digest(fitted) for name, fitted in fits.items()}
    wanted["mean"] = _mean()
    trials: tuple[Trial, ...] = (_two_runs, _run_and_save, _two_threads, _thread_and_prediction)
    with tempfile.TemporaryDirectory(dir=fast_folder()) as root:
        for k in range(n):
            folder = Path(root) / str(k)
            for kind in trials[k % len(trials)](folder, chance, wanted):
                if kind in ("wrong", "raw"):
                    print(f"pair {k}, {trials[k % len(trials)].__name__}: {kind}", file=sys.stderr)
                counts[kind] += 1
            shutil.rmtree(folder, ignore_errors=True)
    return dict(counts)


def _mean() -> str:
    """Return predictions of the fit, as text."""
    return str(run(None).predict(federation(), draws=4).mean.tolist())


def _two_runs(folder: Path, chance: random.Random, wanted: dict[str, str]) -> list[str]:
    """Two processes run the same fit in one folder; afterwards it is resumed there."""
    one = copied(lambda: digest(run(folder)))
    time.sleep(chance.random() * 0.3)
    two = copied(lambda: digest(run(folder)))
    kinds = [judged(copy.outcome(), {wanted["run"]}) for copy in (one, two)]
    return [*kinds, judged(copied(lambda: digest(run(folder))).outcome(), {wanted["run"]})]


def _run_and_save(folder: Path, chance: random.Random, wanted: dict[str, str]) -> list[str]:
    """One process runs in a folder into which another saves the fit of another run."""

    def saves() -> str:
        time.sleep(chance.random() * 0.2)
        other = run(None, seed=4)
        other.save(folder, with_data=True)
        return digest(other)

    one, two = copied(lambda: digest(run(folder))), copied(saves)
    kinds = [judged(one.outcome(), {wanted["run"]}), judged(two.outcome(), {wanted["other"]})]
    if sorted(kinds) != ["refused", "right"]:
        return [*kinds, "wrong"]  # one folder holds one of them
    seed, name = (3, "run") if kinds[0] == "right" else (4, "other")
    again = copied(lambda: digest(run(folder, seed=seed)))
    return [*kinds, judged(again.outcome(), {wanted[name]})]


def _in_threads(calls: list[Callable[[], str]]) -> list[Outcome]:
    """Call functions at once, each in a thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(answered, calls))


def _two_threads(folder: Path, chance: random.Random, wanted: dict[str, str]) -> list[str]:
    """Two threads of a process run two fits, each in a folder of its own."""
    return _of_threads(
        {
            "run": lambda: digest(run(folder / "a")),
            "other": lambda: digest(run(folder / "b", seed=4)),
        },
        wanted,
    )


def _thread_and_prediction(
    folder: Path, chance: random.Random, wanted: dict[str, str]
) -> list[str]:
    """One thread fits while another predicts."""
    return _of_threads({"run": lambda: digest(run(folder)), "mean": _mean}, wanted)


def _of_threads(calls: dict[str, Callable[[], str]], wanted: dict[str, str]) -> list[str]:
    """Judge calls made at once in the threads of a copy of this process."""

    def all_at_once() -> str:
        found = zip(calls, _in_threads(list(calls.values())), strict=True)
        return " ".join(judged(outcome, {wanted[name]}) for name, outcome in found)

    done = copied(all_at_once).outcome()
    return done.text.split() if done.kind == "done" else ["raw"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attack as the command line says."""
    run_attack(pairs, __doc__, arguments)


if __name__ == "__main__":
    main()
