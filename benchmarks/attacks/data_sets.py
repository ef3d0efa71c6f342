"""Malformed and strange data sets, handed to `ClientData`, `from_frame` and `fit`.

Each must be taken rightly or refused by name: no wrong data, and no error that is not hierfl's own.
"""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import numpy as np

import hierfl
from benchmarks.attacks import data_set_cases as cases
from benchmarks.attacks import data_set_frames as frames
from benchmarks.attacks.data_set_cases import Case, table_of
from benchmarks.attacks.data_set_fits import FITS

PACKAGE = str(Path(hierfl.__file__).parent)

DATA = (
    cases.ids_that_are_missing,
    cases.ids_that_look_alike,
    cases.ids_of_mixed_kinds,
    cases.ids_of_other_types,
    cases.ids_that_are_none,
    cases.fields_of_other_types,
    cases.fields_that_are_no_numbers,
    cases.numbers_beyond_float32,
    cases.arrays_that_change_later,
    cases.parts_that_do_not_fit,
    frames.strings_in_a_frame,
    frames.frames_to_refuse,
)


def attack(n: int = 100, seed: int = 0) -> dict[str, int]:
    """Hand `n` malformed or strange data sets to hierfl, and count what became of them.

    Args:
        n: number of data sets.
        seed: of the data sets.

    Returns:
        Counts: "tried"; "right": accepted, and as the clean equivalent; "refused": by an error that
            hierfl
        raises itself and that names the thing; "wrong": accepted, and different; "raw": any other
        error.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    counts = {"tried": 0, "right": 0, "refused": 0, "wrong": 0, "raw": 0}
    for _ in range(n):
        counts["tried"] += 1
        counts[outcome(case_of(rng))] += 1
    return counts


def case_of(rng: np.random.Generator) -> Case:
    """Draw one case: every fifth is a fit."""
    t = table_of(rng)
    if rng.random() < 0.2:
        return Case(*FITS[int(rng.integers(len(FITS)))](t.ids, t.y, t.x, rng))
    return DATA[int(rng.integers(len(DATA)))](t, rng)


def outcome(case: Case) -> str:
    """Return what becomes of a case: "right", "refused", "wrong" or "raw"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.make()
    except Exception as error:
        return "refused" if is_refusal(error, case.things) else "raw"
    return "right" if case.right is not None and case.right(found) else "wrong"


def is_refusal(error: Exception, things: tuple[str, ...]) -> bool:
    """Return whether hierfl raised the error itself, and its message names the thing and a mend."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error)
    ours = last.filename.startswith(PACKAGE)
    return ours and ":" in message and any(thing in message for thing in things)
