"""Attacks with few repetitions: nothing wrong and nothing raw comes out, and they can tell."""

import os
from pathlib import Path

import pytest

from benchmarks.attacks import kills, together
from benchmarks.attacks.forked import Outcome, judged


@pytest.mark.slow
def test_killed_fits_and_saves_end_right() -> None:
    found = kills.attack(8, seed=1)
    assert found == {"right": 8, "refused": 0, "wrong": 0, "raw": 0}


@pytest.mark.slow
def test_two_at_once_are_right_or_refused() -> None:
    found = together.attack(4, seed=1)
    assert found["wrong"] == found["raw"] == 0
    assert found["right"] >= 6


def test_an_operation_on_the_disk_is_met_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack counts what a save does to the disk, and calls in between; so it can kill
    there.
    """
    for module, name in kills.OPERATIONS:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    seen: list[tuple[str, bool]] = []
    target = tmp_path / "there"
    met = kills._watched(
        lambda: seen.append(("before", target.exists())),
        lambda: seen.append(("after", target.exists())),
    )
    os.mkdir(target)
    assert met == [1] and seen == [("before", False), ("after", True)]


def test_outcomes_are_judged(tmp_path: Path) -> None:
    assert judged(Outcome("done", "a"), {"a"}) == "right"
    assert judged(Outcome("done", "b"), {"a"}) == "wrong"
    assert judged(Outcome("refused", "..."), {"a"}) == "refused"
    assert judged(Outcome("raw", "..."), {"a"}) == judged(Outcome("killed"), {"a"}) == "raw"
