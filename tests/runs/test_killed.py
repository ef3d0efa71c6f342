"""A run whose process is killed, or whose disk is full: it resumes to the same bytes, and nothing is lost."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hierfl
from hierfl.core.disk import CannotWrite, write_all, writing
from hierfl.engine.client_store import new_stored
from hierfl.methods import fedsvi
from hierfl.runs import checkpoint as state
from tests.programs import federation, fit, regression
from tests.runs.fits import two_rounds

SCRIPT = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
from tests.programs import federation, fit, regression
import hierfl
from hierfl.runs import checkpoint as state

folder, rounds = sys.argv[1], 12
method, data = hierfl.methods.fedsvi(regression, batch_size=2, local_steps=1), federation((5, 3, 7, 1, 2))
options = dict(rounds=rounds, seed=3, cohort=3, checkpoint_every=1)

def run(where):
    fit(method, data, checkpoint=where, resume=True, **options)

def child(where):
    pid = os.fork()
    if not pid:
        try:
            run(where)
        finally:
            os._exit(0)
    return pid

fit(method, data, rounds=1)  # the first call is slow, and must not be timed
began = time.perf_counter()
os.waitpid(child(folder + "/whole"), 0)
whole = time.perf_counter() - began
moments = random.Random(0)
reached = []

def newest():
    found = state.checkpoints(folder + "/killed")
    return int(found[-1].name[-8:]) if found else 0

for least in (0, 2, 5):  # however slow the machine has become
    pid = child(folder + "/killed")
    while newest() < least:
        time.sleep(0.001)
    time.sleep(moments.uniform(0.0, 1.5) * whole / rounds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reached.append(newest())
print(reached)
os.waitpid(child(folder + "/killed"), 0)
"""


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    """A run with a checkpoint every round, killed three times, ends with the bytes of an uninterrupted run."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    told = subprocess.check_output(command, timeout=1800, env=environment, text=True)
    reached = [int(n) for n in told.strip("[]\n").split(",")]
    assert reached == sorted(reached), "no completed checkpoint is lost"
    assert reached[-1] > 0 and reached[0] < 12, reached
    newest = [state.checkpoints(tmp_path / name)[-1] for name in ("whole", "killed")]
    assert [path.name for path in newest] == ["round-00000012"] * 2
    for part in ("global.safetensors", "local.safetensors"):
        assert (newest[0] / part).read_bytes() == (newest[1] / part).read_bytes()
    records = [state.read_record(path) for path in newest]
    whole, killed = ([row["elbo"] for row in record.history] for record in records)
    assert whole == killed
    assert not list((tmp_path / "killed").glob(".draft-*")), "drafts of the killed are removed"


SAYS = r"cannot be written \([\d,]+ bytes: .*\): free some space there or make it writable, or name another place"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_file", "write_private", "os.fsync"])
def test_a_full_disk_is_named(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rounds": 4, "checkpoint": tmp_path, "checkpoint_every": 2}
    whole = fit(fedsvi(regression), federation(), rounds=4)
    saves = state.save
    calls = []

    def second_save_fails(*args: Any, **kwargs: Any) -> Path:
        calls.append(1)
        with pytest.MonkeyPatch.context() as patch:
            if len(calls) == 2:
                patch.setattr(os, "fsync", full) if where == "os.fsync" else patch.setattr(
                    state, where, full
                )
            return saves(*args, **kwargs)

    monkeypatch.setattr(state, "save", second_save_fails)
    with pytest.raises(OSError, match=r"No space left on device.* bytes are free") as told:
        fit(fedsvi(regression), federation(), **options)
    assert told.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["round-00000002"]
    monkeypatch.undo()
    resumed = fit(fedsvi(regression), federation(), resume=True, **options)
    assert torch.equal(whole.draws(3).own["slope"], resumed.draws(3).own["slope"])


def test_a_limit_of_the_system_is_named_too(tmp_path: Path) -> None:
    """A real limit, met by safetensors, which reports it by an error of its own."""
    fitted = fit(fedsvi(regression), federation((600, 500)), rounds=1)
    fitted.save(tmp_path)
    here, there = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.12 warns of forks of a process with threads
        patch.setattr("warnings.filters", [])
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        try:
            fitted.save(tmp_path, with_data=True)
        except OSError as error:
            os.write(there, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(there)
    told = os.read(here, 10_000).decode()
    os.close(here)
    assert "local-rows.safetensors' cannot be written (" in told and "File too large" in told
    assert [p.name for p in tmp_path.iterdir()] == ["round-00000001"]
    assert hierfl.load(tmp_path).progress.round == 1


def test_drafts_of_the_dead_go_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space that they take may be what the save needs."""
    draft = tmp_path / ".draft-00000001-77"
    draft.mkdir()
    (draft / ".tmpAbc").write_bytes(b"half")
    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(OSError, match=SAYS):
        two_rounds().save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_row_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_stored({"w": torch.zeros(50)}, 3, tmp_path / "rows.bin")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: pwrite(file, content[:7], at))
    rows = {"w": torch.arange(100.0).view(2, 50)}
    table.put(torch.tensor([0, 2]), rows)
    assert torch.equal(table.taken(torch.tensor([0, 2]))["w"], rows["w"])


def test_a_row_that_is_not_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_stored({"w": torch.zeros(50)}, 3, tmp_path / "rows.bin")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CannotWrite, match=rf"rows.bin' {SAYS}"):
        table.put(torch.tensor([0]), {"w": torch.ones(1, 50)})
    with pytest.raises(CannotWrite):
        write_all(0, b"x", 0, tmp_path / "x")


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "x", 1):
        raise ZeroDivisionError
