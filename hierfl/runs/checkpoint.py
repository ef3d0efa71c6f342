"""Where a run stands, on disk: safetensors and JSON, written whole or not at all, never pickled.

run/round-00000300/state.json           what was run, how far, history, hashes of the two files beside it
run/round-00000300/global.safetensors   the server's state: what may be shared
run/round-00000300/local.safetensors    a row a client of what clients keep to themselves: what may not
run/local-table.bin                     those rows, where they are too many for memory; local.safetensors says where each is
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hierfl.core.trees import Tree, named_leaves, with_leaves
from hierfl.engine.client_store import Stored, Table
from hierfl.engine.rounds import ROWS, Progress
from hierfl.program.recipes import translated

FORMAT, VERSION, KEPT = (
    "hierfl-run",
    1,
    2,
)  # KEPT: checkpoints kept, so that one that is damaged has one before it


class CheckpointError(ValueError):
    """A checkpoint that is damaged, foreign, or of another run; the message says which and what to do."""


def save(folder: str | Path, progress: Progress, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint; nobody ever sees half of one, and the one before it is kept.

    Args:
        folder: of the run; made if it is not there.
        progress: where the run stands.
        about: what identifies the run (`hierfl.runs.fit.about`), as JSON.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"round-{progress.round:08d}"
    draft = root / f".draft-{progress.round:08d}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    table = progress.table
    if isinstance(table, Stored) and table.path != root / ROWS:
        table = table.copied(root / ROWS)
    local = table.index() if isinstance(table, Stored) else table
    hashes = {
        name: _write(draft / f"{name}.safetensors", tree)
        for name, tree in (("global", progress.server), ("local", local))
    }
    record = {
        "format": FORMAT,
        "version": VERSION,
        "round": progress.round,
        "compiled": progress.compiled,
        "hashes": hashes,
        "about": about,
        "history": progress.history,
    }
    _flush(draft / "state.json", json.dumps({**record, "sha256": _digest(record)}).encode())
    if final.exists():  # the same round again: the older copy makes way only for a complete one
        shutil.rmtree(final)
    os.replace(draft, final)
    _sync(root)
    for other in checkpoints(
        root
    ):  # of a run that was here before: what is written last is what is found
        if other.name > final.name or not _is_of(other, about):
            shutil.rmtree(other, ignore_errors=True)
    for old in checkpoints(root)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    for left in root.glob(".draft-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if isinstance(table, Stored):
        table.pin(_indices(root))
    return final


def _is_of(path: Path, about: Mapping[str, Any]) -> bool:
    try:
        found: Any = read_record(path)["about"]
    except CheckpointError:
        return True  # damaged: `load` passes it over, and says so
    return bool(_as_now(found) == _as_now(json.loads(json.dumps(about))))


def _as_now(about: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run, its method described as this release does: hierfl 0.1.0 wrote other names."""
    return {k: translated(v) if k == "method" else v for k, v in about.items()}


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(Path(folder).glob("round-[0-9]*"))


def load(
    folder: str | Path, template: Progress, about: Mapping[str, Any] | None = None
) -> Progress:
    """Read the newest checkpoint that is whole; one that is not is named in a warning, and the one before it taken.

    Args:
        folder: of the run.
        template: a run that has not begun, for the structure of its states.
        about: what the run must be of; None: any.

    Raises:
        CheckpointError: no checkpoint is there, none is whole, or it is of another run.
    """
    reasons = []
    for path in reversed(checkpoints(folder)):
        try:
            record = read_record(path)
            state = Progress(
                _read(path / "global.safetensors", record["hashes"]["global"], template.server),
                _read_table(path, record["hashes"]["local"], template.table),
                tuple(record["history"]),
                record["round"],
                record["compiled"],
            )
        except CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
            continue
        if about is not None:
            _check_same(path, record["about"], about)
        if reasons:
            warnings.warn(
                f"passed over damaged checkpoints of '{folder}': {'; '.join(reasons)}", stacklevel=2
            )
        return state
    found = "; ".join(reasons) or "there is none"
    raise CheckpointError(
        f"no whole checkpoint in '{folder}' ({found}): name another folder, or remove this one and start anew"
    )


def read_record(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint.

    Raises:
        CheckpointError: it is not there, not JSON, or not hierfl's.
    """
    try:
        record = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"state.json cannot be read ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError("state.json is not of a hierfl run")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"it was written in format {record.get('version')}; this hierfl reads {VERSION}"
        )
    if record.pop("sha256", None) != _digest(record):
        raise CheckpointError("state.json is truncated or changed")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    found, wanted = _as_now(found), _as_now(json.loads(json.dumps(wanted)))
    differ = [key for key in wanted if found.get(key) != wanted[key]]
    if differ:
        raise CheckpointError(
            f"'{path}' is of another run: it differs in {', '.join(differ)} ({differ[0]}: {_short(found.get(differ[0]))} there, "
            f"{_short(wanted[differ[0]])} here); resume with the same call, or name another folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:197] + "..."


def _write(path: Path, tree: Tree) -> str:
    leaves = {name: leaf.detach().clone().contiguous() for name, leaf in named_leaves(tree).items()}
    save_file(
        leaves or {"nothing": torch.zeros(0)}, path
    )  # an empty file cannot be told from a truncated one
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _read_table(path: Path, expected: str, template: Table) -> Table:
    if not isinstance(template, Stored):
        return _read(path / "local.safetensors", expected, template)
    index = _read(
        path / "local.safetensors", expected, {"places": template.places, "sums": template.sums}
    )
    found = template.at(path.parent / ROWS, index)
    if os.fstat(found.file).st_size < found.used * found.row_bytes:
        raise CheckpointError(f"{ROWS} is truncated or missing")
    found.pin(_indices(path.parent))
    return found


def _indices(root: Path) -> list[Tree]:
    """Where the checkpoints of a run say that rows are."""
    found = []
    for path in checkpoints(root):
        with suppress(SafetensorError, OSError):  # one that is damaged points to nothing
            found.append(
                {
                    name.strip("[]'"): value
                    for name, value in load_file(path / "local.safetensors").items()
                }
            )
    return found


def _read(path: Path, expected: str, template: Tree) -> Tree:
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing")
    if _hash(path) != expected:
        raise CheckpointError(f"{path.name} is truncated or changed")
    try:
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:  # pragma: no cover - the hash would have differed
        raise CheckpointError(f"{path.name} cannot be read ({error})") from error
    wanted = named_leaves(template)
    for name, leaf in wanted.items():
        if name not in found:
            raise CheckpointError(f"{path.name} lacks {name}")
        if found[name].shape != leaf.shape or found[name].dtype != leaf.dtype:
            raise CheckpointError(
                f"{path.name}: {name} is {found[name].dtype} {tuple(found[name].shape)}, not {leaf.dtype} {tuple(leaf.shape)}"
            )
    return with_leaves(template, {name: found[name] for name in wanted})


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make a rename in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
