"""Checkpoints on disk: safetensors and JSON, written whole or not at all, never pickled.

run/round-00000300/state.json           what was run, rounds done, history, hashes of the two files beside it
run/round-00000300/global.safetensors   the server's state, which may be shared
run/round-00000300/local.safetensors    client state, a row for each client, which is private
run/local-table.bin                     those rows if too large for memory; local.safetensors is their index
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from hierfl.core.trees import Tree, named_leaves, with_leaves
from hierfl.engine.client_store import NONE, Stored, Table
from hierfl.engine.client_store import CheckpointError as CheckpointError
from hierfl.engine.rounds import TABLE_FILE, Progress
from hierfl.program.differences import Differences, differences
from hierfl.runs.records import check_record, digest, read_json

FORMAT, VERSION = "hierfl-run", 1
KEPT = 2  # checkpoints of a run, so that a damaged one has one before it


def save(folder: str | Path, progress: Progress, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint, whole or not at all; the one before it is kept.

    Args:
        folder: of the run; made if it does not exist.
        progress: where the run stands.
        about: what identifies the run (`hierfl.engine.federation.about`), as JSON.

    Returns:
        The checkpoint's folder.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    table = progress.table
    if isinstance(table, Stored) and table.path != root / TABLE_FILE:
        table = table.copied(root / TABLE_FILE)
    draft = _write_draft(root, progress, table, about)
    final = root / f"round-{progress.round:08d}"
    # an older checkpoint of the same round is removed only once its successor is complete
    if final.exists():
        shutil.rmtree(final)
    os.replace(draft, final)
    _sync(root)
    _remove_others(root, final, about)
    if isinstance(table, Stored):
        table.pin(_indices(root))
    return final


def _write_draft(root: Path, progress: Progress, table: Table, about: Mapping[str, Any]) -> Path:
    """Write the files of a checkpoint to a folder that no reader looks into."""
    draft = root / f".draft-{progress.round:08d}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
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
    _flush(draft / "state.json", json.dumps({**record, "sha256": digest(record)}).encode())
    return draft


def _remove_others(root: Path, final: Path, about: Mapping[str, Any]) -> None:
    """Remove checkpoints of earlier runs, old ones of this run, and drafts of killed processes."""
    for other in checkpoints(root):
        # `load` takes the last by name: a later round of an earlier run would hide the one just written
        if other.name > final.name or not _is_of(other, about):
            shutil.rmtree(other, ignore_errors=True)
    for old in checkpoints(root)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    for draft in root.glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


def _is_of(path: Path, about: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of a run, or damaged: then `load` skips it with a warning."""
    try:
        found = read_record(path)["about"]
    except CheckpointError:
        return True
    return not compared(found, about).differs


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first."""
    return sorted(Path(folder).glob("round-[0-9]*"))


def load(
    folder: str | Path, template: Progress, about: Mapping[str, Any] | None = None
) -> Progress:
    """Read the newest undamaged checkpoint; damaged ones after it are named in a warning.

    Args:
        folder: of the run.
        template: of a run before its first round, for the structure of its states.
        about: what must identify the run, as `save` was given it, or a part of that; None: any run.

    Raises:
        CheckpointError: the folder holds no checkpoint, none is undamaged, or the run is another one.
    """
    reasons = []
    for path in reversed(checkpoints(folder)):
        try:
            record = read_record(path)
            if path.name != f"round-{record['round']:08d}":
                raise CheckpointError(f"it holds round {record['round']}: it was renamed")
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
        unknown = check_same(path, record["about"], about or {})
        if unknown:
            warnings.warn(
                f"whether '{path}' is of this run is not certain: {'; '.join(unknown[:3])}",
                stacklevel=2,
            )
        if reasons:
            warnings.warn(
                f"passed over damaged checkpoints of '{folder}': {'; '.join(reasons)}", stacklevel=2
            )
        return state
    found = "; ".join(reasons) or "there is none"
    raise CheckpointError(
        f"no undamaged checkpoint in '{folder}' ({found}): name another folder, or remove this one and start "
        f"again"
    )


def read_record(path: Path) -> dict[str, Any]:
    """Read the state.json of a checkpoint.

    Raises:
        CheckpointError: the file is missing, not JSON, damaged, not of hierfl, or of another version of the
            format; or an entry is missing or not what `save` writes.
    """
    record = read_json(path / "state.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError("state.json is not of a hierfl run")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"it was written in format {record.get('version')}; this hierfl reads {VERSION}"
        )
    if record.pop("sha256", None) != digest(record):
        raise CheckpointError("state.json is truncated or changed")
    check_record(record)
    return dict(record)


def check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Refuse a checkpoint of another run.

    Args:
        path: of the checkpoint, for the message.
        found: what identifies the run there (`hierfl.engine.federation.about`).
        wanted: what must identify it, or a part of that.

    Returns:
        What cannot be compared, in words.

    Raises:
        CheckpointError: the run is another one; the message names what differs.
    """
    differs, unknown = compared(found, wanted)
    if differs:
        raise CheckpointError(
            f"'{path}' is of another run: it differs in {'; '.join(differs[:3])}; resume with the same call, "
            f"or name another folder"
        )
    return unknown


def compared(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Differences:
    """Return in what two runs differ, of what `wanted` holds."""
    wanted = json.loads(json.dumps(wanted))
    method = differences(found.get("method"), wanted.get("method", found.get("method")))
    differs = [f"method ({told})" for told in method.differs]
    for key in wanted.keys() - {"method"}:
        if found.get(key) != wanted[key]:
            differs += [
                f"{key} ({key}: {_short(found.get(key))} there, {_short(wanted[key])} here)"
            ]
    return Differences(sorted(differs), method.unknown)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:197] + "..."


def _write(path: Path, tree: Tree) -> str:
    """Write a tree to disk, and return the hash of the file."""
    leaves = {name: leaf.detach().clone().contiguous() for name, leaf in named_leaves(tree).items()}
    # an empty file could not be told from a truncated one
    save_file(leaves or {"nothing": torch.zeros(0)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _read_table(path: Path, expected: str, template: Table) -> Table:
    """Read the client states of a checkpoint."""
    if not isinstance(template, Stored):
        return _read(path / "local.safetensors", expected, template)
    index = _read(
        path / "local.safetensors", expected, {"places": template.places, "sums": template.sums}
    )
    places = index["places"]
    if len(places) and int(places.min()) < NONE:
        raise CheckpointError("local.safetensors points before the beginning of the table")
    try:
        found = template.at(path.parent / TABLE_FILE, index)
    except OSError as error:
        raise CheckpointError(f"{TABLE_FILE} cannot be opened ({error.strerror})") from error
    if os.fstat(found.file).st_size < found.used * found.row_bytes:
        raise CheckpointError(f"{TABLE_FILE} is truncated or missing")
    found.pin(_indices(path.parent))
    return found


def _indices(root: Path) -> list[Tree]:
    """Return the index of the table in each checkpoint of a run."""
    found = []
    for path in checkpoints(root):
        with suppress(CheckpointError):  # a damaged one points to nothing
            leaves = {
                name.strip("[]'"): v for name, v in read_tensors(path / "local.safetensors").items()
            }
            if "places" in leaves:
                found.append(leaves)
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors that need not be trusted.

    Raises:
        CheckpointError: the file is missing, is no plain file, or is damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    try:
        return load_file(path)
    except (
        Exception
    ) as error:  # safetensors raises its own, and those of torch at what it does not know
        raise CheckpointError(f"{path.name} cannot be read ({error})") from error


def _read(path: Path, expected: str, template: Tree) -> Tree:
    """Read a tree of the structure of `template` from a file whose hash must be as expected."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    if _hash(path) != expected:
        raise CheckpointError(f"{path.name} is truncated or changed")
    found = read_tensors(path)
    wanted = named_leaves(template)
    for name, leaf in wanted.items():
        if name not in found:
            raise CheckpointError(f"{path.name} lacks {name}")
        if found[name].shape != leaf.shape or found[name].dtype != leaf.dtype:
            raise CheckpointError(
                f"{path.name}: {name} is {found[name].dtype} {tuple(found[name].shape)}, not {leaf.dtype} "
                f"{tuple(leaf.shape)}"
            )
    foreign = found.keys() - wanted.keys() - {"nothing"}
    if foreign:
        raise CheckpointError(f"{path.name} holds {min(foreign)}, which the method does not have")
    # copies lie where torch aligns memory; products of float32 in a file's bytes round otherwise
    return with_leaves(template, {name: found[name].clone() for name in wanted})


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write a folder's entries to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
