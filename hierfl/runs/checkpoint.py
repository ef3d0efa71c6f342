"""Checkpoints on disk: safetensors and JSON, written whole or not at all, never pickled.

run/round-00000300/state.json           what was run, rounds done, history, hashes of the others
run/round-00000300/global.safetensors   the server's state, which may be shared
run/round-00000300/local.safetensors    client state, a row for each client, which is private
run/local-table.bin                     those rows if too large for memory, with their index above
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hierfl.core.disk import PRIVATE_FILE, private_folder, write_private, writing
from hierfl.core.trees import Tree, named_leaves, nbytes, with_leaves
from hierfl.core.user_warnings import warn
from hierfl.engine.client_store import NONE, Stored, Table
from hierfl.engine.client_store import CheckpointError as CheckpointError
from hierfl.engine.rounds import TABLE_FILE, Progress
from hierfl.runs.records import Record, compared, digest, is_of, read_json, sealed, typed
from hierfl.runs.run_folder import RECORD, clear, draft_of, prune, put, round_of, sync
from hierfl.runs.run_folder import checkpoints as checkpoints

FORMAT, VERSION = "hierfl-run", 4
PROGRESS = tuple(of.name for of in fields(Progress) if of.name not in ("server", "table"))


def save(
    folder: str | Path,
    progress: Progress,
    about: Mapping[str, Any],
    *,
    beside: Mapping[str, bytes | dict[str, Tensor]] | None = None,
) -> Path:
    """Write a checkpoint whole or not at all, with files `beside`; the caller holds the folder's lock."""
    root = Path(folder)
    private_folder(root)
    clear(root)
    table = progress.table
    if isinstance(table, Stored) and table.path != root / TABLE_FILE:
        table = table.copied(root / TABLE_FILE)
    ours = partial(is_of_run, about=about)
    with writing(root, 0):
        draft = draft_of(root, progress.round)
        try:
            _write_draft(draft, progress, table, about, beside or {})
            final = put(root, draft, progress.round, ours)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # the space it takes may be what is missing
            raise
        prune(root, final, ours)
    if isinstance(table, Stored):
        table.pin(_indices(root))
    return final


def _write_draft(
    draft: Path,
    progress: Progress,
    table: Table,
    about: Mapping[str, Any],
    beside: Mapping[str, bytes | dict[str, Tensor]],
) -> None:
    """Write the files of a checkpoint; the record, which makes it one, comes last."""
    local = table.index() if isinstance(table, Stored) else table
    hashes = {
        name: _write(draft / f"{name}.safetensors", tree)
        for name, tree in (("global", progress.server), ("local", local))
    }
    for name, content in beside.items():
        if isinstance(content, bytes):
            write_private(draft / name, content)
            hashes[name] = _hash(draft / name)
        else:
            tensors = {k: v.contiguous() for k, v in content.items()}
            hashes[name] = _write_tensors(draft / name, tensors)
    record = {"format": FORMAT, "version": VERSION, "hashes": hashes, "about": sealed(about)}
    record |= {name: getattr(progress, name) for name in PROGRESS}
    content = json.dumps({**record, "sha256": digest(record)}).encode()
    write_private(draft / RECORD, content)
    sync(draft)


def is_of_run(path: Path, about: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of a run, as far as its record can be read."""
    try:
        return is_of(read_record(path).about, about)
    except CheckpointError:
        return False


def load(
    folder: str | Path,
    template: Progress,
    about: Mapping[str, Any] | None = None,
    *,
    grows: Collection[str] = (),
) -> Progress:
    """Read the newest undamaged checkpoint of the run `about` (None: any), in the structure of `template`.

    `grows` is the server's.
    """
    reasons, unknown = [], []
    for path in reversed(checkpoints(folder)):
        try:
            record = read_record(path)
        except CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
            continue
        if round_of(path) != record.round:
            reasons.append(f"{path.name}: it holds round {record.round}, so it was renamed")
            continue
        # before the files of another method are read
        unknown = check_same(path, record.about, about or {})
        hashes = record.hashes
        try:
            server = _read(path / "global.safetensors", hashes["global"], template.server, grows)
            table = _read_table(path, hashes["local"], template.table)
        except CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
            continue
        if unknown:
            doubt = "; ".join(unknown[:3])
            warn(f"it is not certain that '{path}' belongs to this run: {doubt}")
        if reasons:
            damaged = "; ".join(reasons)
            warn(f"skipped damaged checkpoints of '{folder}': {damaged}")
        return Progress(server, table, **{name: getattr(record, name) for name in PROGRESS})
    damage = "; ".join(reasons) or "there is none"
    what = f"no undamaged checkpoint in '{folder}' ({damage})"
    raise CheckpointError(f"{what}: name another folder, or remove this one and start again")


def read_record(path: Path) -> Record:
    """Read the state.json of a checkpoint, refusing what `save` cannot have written."""
    record = read_json(path / "state.json")
    reason = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        reason = "does not belong to a hierfl run"
    elif record.get("version") != VERSION:
        reason = f"was written in format {record.get('version')}; this hierfl reads {VERSION}"
    elif record.pop("sha256", None) != digest(record):
        reason = "is truncated or changed"
    if reason is not None:
        raise CheckpointError(f"state.json {reason}")
    return typed(Record, record, "state.json")


def check_same(path: Path, record: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Refuse a checkpoint of another run; return what cannot be compared, in words."""
    difference = compared(record, about)
    if difference.differs:
        what = f"'{path}' belongs to another run: it differs in {difference.in_words}"
        raise CheckpointError(f"{what}; resume with the same call, or name another folder")
    return difference.unknown


def _write(path: Path, tree: Tree) -> str:
    leaves = {name: leaf.detach().clone().contiguous() for name, leaf in named_leaves(tree).items()}
    # an empty file looks like a truncated one
    return _write_tensors(path, leaves or {"nothing": torch.zeros(0)})


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    with writing(path, nbytes(list(tensors.values())), foreign=SafetensorError):
        save_file(tensors, path)
        os.chmod(path, PRIVATE_FILE)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return _hash(path)


def _read_table(path: Path, expected: str, template: Table) -> Table:
    local, rows = path / "local.safetensors", path.parent / TABLE_FILE
    if not isinstance(template, Stored):
        return _read(local, expected, template)
    index = _read(local, expected, {"places": template.places, "sums": template.sums})
    places = index["places"]
    if len(places) and int(places.min()) < NONE:
        raise CheckpointError("local.safetensors points before the beginning of the table")
    try:
        table = template.at(rows, index) if rows.exists() else None
    except OSError as error:
        raise CheckpointError(f"{TABLE_FILE} cannot be opened ({error.strerror})") from error
    if table is None or os.fstat(table.file).st_size < table.used * table.row_bytes:
        raise CheckpointError(f"{TABLE_FILE} is truncated or missing")
    table.pin(_indices(path.parent))
    return table


def _indices(root: Path) -> list[Tree]:
    indices = []
    for path in checkpoints(root):
        with suppress(CheckpointError):  # a damaged one points to nothing
            tensors = read_tensors(path / "local.safetensors")
            leaves = {name.strip("[]'"): v for name, v in tensors.items()}
            if "places" in leaves:
                indices.append(leaves)
    return indices


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors that need not be trusted; a CheckpointError says how it is damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    try:
        return load_file(path)
    except Exception as error:  # safetensors' own, and torch's at what it does not know
        raise CheckpointError(f"{path.name} cannot be read ({error})") from error


def _read(path: Path, expected: str, template: Tree, grows: Collection[str] = ()) -> Tree:
    """Read a tree of the structure of `template` from a file whose hash must be as expected."""
    if path.is_file() and _hash(path) != expected:
        raise CheckpointError(f"{path.name} is truncated or changed")
    tensors, leaves = read_tensors(path), named_leaves(template)
    for difference in _differences(tensors, leaves, grows):
        raise CheckpointError(f"{path.name} {difference}")
    # copies lie where torch aligns memory; products of float32 in a file's bytes round otherwise
    return with_leaves(template, {name: tensors[name].clone() for name in leaves})


def _differences(
    tensors: Mapping[str, Tensor], leaves: Mapping[str, Tensor], grows: Collection[str]
) -> Iterator[str]:
    """Yield how tensors of a file differ from those that a method has; `grows` may have other first sizes."""
    for name, leaf in leaves.items():
        if name not in tensors:
            yield f"lacks {name}"
            continue
        first = int(re.split(r"[.\[]", name)[-1].strip("']") in grows)
        forms = [(v.dtype, v.dim(), v.shape[first:]) for v in (tensors[name], leaf)]
        if forms[0] != forms[1]:
            here, there = (f"{v.dtype} {tuple(v.shape)}" for v in (leaf, tensors[name]))
            yield f"has {name} of {there}, not {here}"
    for name in sorted(tensors.keys() - leaves.keys() - {"nothing"}):
        yield f"holds {name}, which the method does not have"


def is_whole(path: Path, expected: str) -> bool:
    """Return whether a file is there and has the hash that was recorded."""
    return path.is_file() and _hash(path) == expected


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
