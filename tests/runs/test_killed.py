"""A run whose disk is full resumes to the same, and nothing is lost; benchmarks.attacks.kills kills processes."""

import errno
import os
import resource
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
