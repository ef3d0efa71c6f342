"""The folder of a run: nothing that the run did not write is removed, and one process writes to it at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import hierfl
from hierfl.methods import fedsvi
from hierfl.runs import checkpoint as state
from hierfl.runs.run_folder import LOCK_FILE, clear, held
from tests.programs import assert_close, federation, fit, regression
from tests.runs.fits import two_rounds

ROUNDS = ["round-00000002", "round-00000004"]


def run(folder: Path, **options: Any) -> hierfl.Fit:
    asked = {"rounds": 4, "checkpoint": folder, "checkpoint_every": 2, **options}
    return fit(fedsvi(regression), federation(), **asked)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[hierfl.Fit, Path]:
    """A run of four rounds, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder), folder


@pytest.fixture
def ran(whole: tuple[hierfl.Fit, Path], tmp_path: Path) -> Path:
    """A copy of its folder."""
    return copytree(whole[1], tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def others() -> dict[str, Callable[[hierfl.Fit], hierfl.Fit]]:
    new = federation((4, 2), seed=8)
    return {
        "another run": lambda _: fit(fedsvi(regression), federation(seed=4), rounds=4),
        "of another method": lambda _: fit(
            fedsvi(regression, batch_size=2), federation(), rounds=4
        ),
        "its own new clients": lambda fitted: fitted.personalize(new, rounds=1),
        "of fewer rounds": lambda _: two_rounds(),
    }


@pytest.mark.parametrize("what", others())
def test_saving_over_another_run_is_refused(what: str, whole: tuple[hierfl.Fit, Path]) -> None:
    fitted, folder = whole
    before = contents(folder)
    other = others()[what](fitted)
    with pytest.raises(hierfl.CheckpointError, match=r"holds another run .*name another folder"):
        other.save(folder)
    assert contents(folder) == before


def test_an_earlier_state_of_the_run_does_not_hide_a_later_one(ran: Path, tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (ran / ROUNDS[0]).rename(early / ROUNDS[0])
    older = hierfl.load(early, data=federation())
    with pytest.raises(hierfl.CheckpointError, match=r"after 4 rounds, and this fit has done 2"):
        older.save(ran)


def test_the_users_own_files_stay(tmp_path: Path) -> None:
    """Files that look like checkpoints, drafts or hierfl's own, and files inside a checkpoint, are all kept."""
    mine = [
        "round-00000004-backup/state.json",
        "round-1/notes.txt",
        "round-00000003/notes.txt",
        "round-00000002/notes.txt",
        ".draft-notes",
        ".draft-00000001-77.txt",
        ".replaced-1/x",
        "fit.json",
        "local-rows.safetensors",
        ".lock",
        "drafts/a",
    ]
    for name in mine:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"mine: {name}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted = run(tmp_path, checkpoint_every=1)
    assert [str(w.message).split("'")[1][-14:] for w in said] == [
        "round-00000002",
        "round-00000003",
    ]
    assert "is not as this run wrote it" in str(said[0].message)
    fitted.save(tmp_path, with_data=True)
    moved = {"round-00000002/notes.txt": "round-00000002.aside-1/notes.txt"}
    moved["round-00000003/notes.txt"] = "round-00000003.aside-1/notes.txt"
    for name in mine:
        assert (tmp_path / moved.get(name, name)).read_text() == f"mine: {name}"
    assert torch.equal(hierfl.load(tmp_path).draws(3).own["slope"], fitted.draws(3).own["slope"])


def test_a_damaged_checkpoint_is_set_aside_not_removed(ran: Path) -> None:
    record = ran / ROUNDS[1] / "state.json"
    record.write_bytes(record.read_bytes()[:-30])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(ran, resume=True)
    assert any("skipped damaged" in str(w.message) for w in said)
    assert (ran / "round-00000004.aside-1" / "state.json").exists()
    assert [p.name for p in state.checkpoints(ran)] == ROUNDS


@pytest.mark.parametrize("when", ["before the new one is there", "after"])
def test_a_replacement_that_was_interrupted_loses_no_checkpoint(when: str, tmp_path: Path) -> None:
    """Between its two renames the old checkpoint has another name: it is found, and brought back."""
    fitted = two_rounds()
    fitted.save(tmp_path, with_data=True)
    final, replaced = tmp_path / ROUNDS[0], tmp_path / ".replaced-00000002"
    final.rename(replaced)
    if when == "after":
        fitted.save(tmp_path / "other", with_data=True)
        (tmp_path / "other" / ROUNDS[0]).rename(final)
    assert torch.equal(hierfl.load(tmp_path).draws(3).own["slope"], fitted.draws(3).own["slope"])
    clear(tmp_path)
    assert final.exists() and not replaced.exists()


def test_a_finished_run_that_was_killed_while_it_cleared_up_is_cleared_up(ran: Path) -> None:
    """Found by `benchmarks.attacks.kills`: there is nothing left to save, which cleared up before."""
    (ran / ROUNDS[0]).rename(ran / ".draft-00000002-77")
    run(ran, resume=True)
    assert [p.name for p in ran.iterdir()] == ROUNDS[1:]


HOLDER = """
import sys
from hierfl.runs.run_folder import held
with held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock of a folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], env=environment, **pipes
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other
        other.kill()


def test_a_second_process_is_told_who_holds_it(whole: tuple[hierfl.Fit, Path], ran: Path) -> None:
    """`fit` and `save` are refused while it lives; a lock of a killed process is no lock."""
    before = contents(ran)
    with holder(ran) as other:
        told = rf"process {other.pid} on host {socket.gethostname()} .* since [-\d]{{10}} \d\d:"
        for write in (lambda: whole[0].save(ran), lambda: run(ran, resume=True)):
            with pytest.raises(
                hierfl.FolderInUse, match=f"{told}.*wait until it has ended, or name"
            ):
                write()
        assert {**contents(ran), LOCK_FILE: b""} == {**before, LOCK_FILE: b""}
        assert hierfl.load(ran, data=federation()).progress.round == 4  # reading is free
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert (ran / LOCK_FILE).exists()
        run(ran, resume=True)
    assert not (ran / LOCK_FILE).exists()


def test_a_copy_of_the_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Workers are copies: one that outlives its killed process for a moment must not hold the folder."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with held(tmp_path):
            pid = os.fork()
            if not pid:
                os.close(there)
                os.read(here, 1)  # lives until the test ends
                os._exit(0)
    with held(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
    os.close(there)
    os.waitpid(pid, 0)


def test_the_lock_of_this_process_is_a_lock_too(tmp_path: Path) -> None:
    with held(tmp_path):
        who = json.loads((tmp_path / LOCK_FILE).read_text())
        assert who["pid"] == os.getpid()
        with (
            pytest.raises(hierfl.FolderInUse, match=f"process {os.getpid()} on host"),
            held(tmp_path),
        ):
            pass
    with held(tmp_path):
        pass


def test_a_folder_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("hierfl.runs.run_folder.fcntl.flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked"), held(tmp_path):
        pass


def test_a_lock_on_a_full_disk_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"), held(tmp_path):
            pass
    with held(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_the_engine_is_part_of_a_runs_identity(tmp_path: Path) -> None:
    """Engines agree to rounding, and a resumed run must end with the bytes of one left alone."""
    engine = "sequential"
    (tmp_path / "run").mkdir()
    run(tmp_path / "whole", engine=engine)
    (tmp_path / "whole" / ROUNDS[0]).rename(tmp_path / "run" / ROUNDS[0])
    with pytest.raises(
        hierfl.CheckpointError,
        match=rf'differs in engine \(engine: "{engine}" there, "vectorized" here\)',
    ):
        run(tmp_path / "run", resume=True)
    resumed = run(tmp_path / "run", resume=True, engine=engine)
    back = hierfl.load(tmp_path / "whole", data=federation())
    assert back.federation.settings.engine == resumed.federation.settings.engine == engine
    assert_close(resumed.progress.server, back.progress.server, 0.0)
    back.save(tmp_path / "whole")  # a fit that was loaded is still of its run
