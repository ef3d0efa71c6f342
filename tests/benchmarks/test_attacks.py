"""The attacks on saved fits: nothing wrong, nothing raw, no code run; and they can tell."""

import json
import os
import resource
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import hierfl
from benchmarks.attacks import flips, records
from benchmarks.attacks.mutations import watched
from hierfl.engine.federation import federate
from hierfl.program.recipes import describe, remake
from hierfl.runs import load as runs_load
from hierfl.runs.load import guarded, remade

BAD = ("wrong", "raw", "code run")


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a method's description, in a folder of its own and with a module that records may
    name.
    """
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("somebodys_module")
    canary = {"canary": records.canary, "Canary": type("Canary", (), {"__init__": records.canary})}
    module.__dict__.update(canary)
    monkeypatch.setitem(sys.modules, "somebodys_module", module)
    return describe(flips.method())


def test_crafted_records_run_no_code(method: Any, tmp_path: Path) -> None:
    """Each name, in each form and at each place, is refused before anything happens."""
    crafted = records.descriptions(method)[::29]
    names = [name for name in records.NAMES if name != "attacked"]
    assert len(crafted) > 200
    records.RAN.clear()
    with watched() as seen:
        for description in crafted:
            if any(name in json.dumps(description) for name in names):
                with pytest.raises(hierfl.CannotRemake):
                    remake(description)
    assert not records.RAN and not list(tmp_path.iterdir())
    assert not [event for event in seen if "__pycache__" not in event]


def test_crafted_folders() -> None:
    counts = records.attack(24, seed=1)
    assert counts["tried"] == 24 and not any(counts[kind] for kind in BAD), counts
    assert counts["refused"] > 12


@pytest.mark.slow
def test_flipped_bytes() -> None:
    counts = flips.attack(12, seed=1)
    assert counts["tried"] == 12 and not any(counts[kind] for kind in BAD), counts
    assert counts["right"] and counts["refused"]


def test_the_attacks_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they count as code that runs, as raw and as wrong, they would find."""
    monkeypatch.chdir(tmp_path)
    records.saved(Path("saved"))
    assert records.outcome(Path("saved")) == "right"
    fit = hierfl.load("saved")

    def loading(error: Exception | None = None, command: str = "", **changed: Any) -> Any:
        def load(folder: Path) -> Any:
            os.system(command) if command else None
            if error:
                raise error
            return hierfl.Fit(fit.method, fit.federation, fit.progress, fit.rounds)

        return load

    monkeypatch.setattr(hierfl, "load", loading(command="true"))
    assert records.outcome(Path("saved")).startswith("code run") and "os.system" in records.outcome(
        Path("saved")
    )
    monkeypatch.setattr(hierfl, "load", loading(KeyError("a")))
    assert records.outcome(Path("saved")).startswith("raw: KeyError")
    shutil.copytree("saved", "other")
    records.sealed(Path("other"), lambda r: {**r, "history": []})
    monkeypatch.setattr(hierfl, "load", loading())
    assert records.outcome(Path("other")) == "wrong"


# ------------------------------------------------------------ absurd sizes
@pytest.mark.parametrize("number", range(len(records.SIZES)))
def test_absurd_sizes_are_refused_before_memory_is_taken(
    number: int, method: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(runs_load, "OPERATIONS", 3000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    who = {
        "seed": 0,
        "fields": {},
        "method": {**method, "with": {**method["with"], "guide": records.SIZES[number]}},
    }
    with pytest.raises(hierfl.CannotRemake):
        made = remade(who, {})
        guarded(who, lambda: federate(made, flips.rows()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes
