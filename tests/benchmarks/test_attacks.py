"""Attacks with few repetitions: nothing wrong and nothing raw comes out, and they can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attacks import kills, together
from benchmarks.attacks.forked import Outcome, judged


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_killed_fits_and_saves_end_right() -> None:
    found = kills.attack(8, seed=1)
    assert found == {"right": 8, "refused": 0, "wrong": 0, "raw": 0}


@pytest.mark.slow
def test_two_at_once_are_right_or_refused() -> None:
    found = together.attack(4, seed=1)
    assert found["wrong"] == found["raw"] == 0
    assert found["right"] >= 6


def test_outcomes_are_judged(tmp_path: Path) -> None:
    assert judged(Outcome("done", "a"), {"a"}) == "right"
    assert judged(Outcome("done", "b"), {"a"}) == "wrong"
    assert judged(Outcome("refused", "..."), {"a"}) == "refused"
    assert judged(Outcome("raw", "..."), {"a"}) == judged(Outcome("killed"), {"a"}) == "raw"
