"""Runs a study: chooses every method's options, then computes and keeps cells, each in its process."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from hierfl.comparisons import cells
from hierfl.comparisons.cells import cell_file, keep, kept
from hierfl.comparisons.federations import of_study
from hierfl.comparisons.result_files import FIGURES, FILES, STUDY, write
from hierfl.comparisons.score_table import published
from hierfl.comparisons.study_file import Study, StudyEntry
from hierfl.comparisons.tuning import chosen
from hierfl.core.disk import claim, replace_text
from hierfl.runs.ended import in_words
from hierfl.runs.run_folder import held

Say = Callable[[str], None]


def set_up_worker() -> None:
    """Give a worker one thread, and end it with its parent."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends: a worker whose parent was killed would wait forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class Failed:
    """A cell or a search that failed: method and seed, and the error's message."""

    what: str
    why: str


def compare(study: Study, out: Path, *, processes: int = 2, say: Say = print) -> list[Failed]:
    """Run a study in its folder `out`, where what is kept is not computed again; return what failed."""
    claim(out, (*FILES, *FIGURES))
    with held(out):
        replace_text(out / STUDY, study.model_dump_json(indent=1))
        check_methods(study)
        with Pool(processes, say) as pool:
            searches = {e.label: partial(_choice, out, study, e) for e in study.methods}
            tuned = pool.all([(f"{label}: options", search) for label, search in searches.items()])
            choices = dict(zip(searches, tuned, strict=True))
            # seed by seed: a process keeps the clients of one seed, which take up to half a minute
            runs = {
                (e.label, seed): partial(_cell, out, study, e, seed, choice["options"])
                for seed in study.run.seeds
                for e in study.methods
                if (choice := choices[e.label]) is not None
            }
            found = pool.all(
                [(f"{label}, seed {seed}", run) for (label, seed), run in runs.items()]
            )
        write(study, out, choices, dict(zip(runs, found, strict=True)))
        return pool.failed


def check_methods(study: Study) -> None:
    """Build every method and look up its published numbers: mistakes show before hours of work."""
    seed = study.run.seeds[0]
    federation = of_study(study, seed)
    for entry in study.methods:
        try:
            cells.method_of(study, entry, {}, federation, study.run.rounds, seed)
            for score in entry.published:
                published(study, entry, score)
        except Exception as error:  # builders take settings as they are: anything may be raised
            raise ValueError(f"method '{entry.label}': {error}") from error


# a name, and what computes it in a process, or finds it kept: what was found, and whether it is new
Job = tuple[str, Callable[[], tuple[dict[str, Any], bool]]]


class Pool:
    """Processes that compute jobs; `say` is called with a line for each."""

    def __init__(self, processes: int, say: Say) -> None:
        self.executor = ProcessPoolExecutor(processes, get_context("spawn"), set_up_worker)
        self.say, self.failed = say, list[Failed]()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown(cancel_futures=True)

    def all(self, jobs: Sequence[Job]) -> list[dict[str, Any] | None]:
        """Return what each job found; None where it failed."""
        began, computed = time.perf_counter(), 0
        futures: dict[Future[Any], int] = {
            self.executor.submit(work): place for place, (_, work) in enumerate(jobs)
        }
        results: list[dict[str, Any] | None] = [None] * len(jobs)
        for done, future in enumerate(as_completed(futures), 1):
            name, _ = jobs[futures[future]]
            try:
                results[futures[future]], new = future.result()
            except (BrokenProcessPool, KeyboardInterrupt):
                raise
            except Exception as error:  # one method must not lose the others
                self.failed.append(Failed(name, f"{type(error).__name__}: {error}"))
                self.say(f"[{done}/{len(jobs)}] {name} failed: {error}")
                continue
            computed += new
            if new:
                per_job = (time.perf_counter() - began) / computed
                time_left = in_words(per_job * (len(jobs) - done))
                self.say(f"[{done}/{len(jobs)}] {name}; {time_left} left")
        return results


def _choice(out: Path, study: Study, entry: StudyEntry) -> tuple[dict[str, Any], bool]:
    choice = chosen(out, study, entry)
    return choice, choice["computed"] > 0


def _cell(
    out: Path, study: Study, entry: StudyEntry, seed: int, options: dict[str, float]
) -> tuple[dict[str, Any], bool]:
    file, key = cell_file(out, study, entry, seed)
    cell = kept(file)
    if cell is not None:
        return cell, False
    cell = cells.computed(study, entry, options, seed)
    keep(file, key, cell)
    return cell, True
