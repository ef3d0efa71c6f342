"""A fit on disk: a checkpoint, what its data look like, and, if asked for, the clients' rows."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import expect_path
from hierfl.core.trees import named_leaves
from hierfl.data.absent import RowsNotSaved, form_of, is_absent, labels_of, rows_absent
from hierfl.data.batch import in_double
from hierfl.data.clients import ClientData
from hierfl.data.frames import FrameRows
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.laplace.trials import FAILS, sites_at, trial
from hierfl.program.program import Program
from hierfl.runs import checkpoint as state
from hierfl.runs.records import FitRecord, Record, about, compared, is_of, read_json, typed
from hierfl.runs.run_folder import ROWS, SCHEMA, held

Fitted = Any  # a `hierfl.Fit`, whose module imports this one
PLACES = (0.1, -0.4)  # unconstrained values at which priors are compared
DIGITS = 30  # binary digits, below the largest of a tensor, in which two starts may not differ
HAND_IN = "pass the clients' rows, load(..., data=...)"


def save(fit: Fitted, folder: str | Path, *, with_data: bool = False) -> None:
    """Write the fit to a folder: server state and client states in two files, and its record.

    Only the owner can read its files. Files that are already in the folder are kept.

    Args:
        fit: the fit to write.
        folder: is created if it does not exist.
        with_data: write the clients' rows too, so that `hierfl.load(folder)` alone restores the
            fit; without them `hierfl.load(folder, data=...)` does.

    Raises:
        CheckpointError: the folder holds another run, or this one after more rounds.
        FolderInUse: another process writes to it; the message says which.
        RowsNotSaved: the fit was itself loaded without its rows.
        OSError: the disk is full, or the folder cannot be written to.
    """
    folder = expect_path(folder, "folder", "run")
    who = about(fit.method, fit.federation, fit.rounds)
    write(folder, fit.progress, who, fit.federation, with_data=with_data)


def write(
    folder: str | Path,
    progress: Progress,
    who: Mapping[str, Any],
    federation: Federation,
    *,
    with_data: bool,
) -> None:
    """Write a fit: a checkpoint with `fit.json` and, if asked for, `local-rows.safetensors`."""
    data = federation.data
    if is_absent(data):
        what = "a fit without its clients' rows is not saved again"
        raise RowsNotSaved(f"{what}: copy its folder, or {HAND_IN}")
    files = beside(federation, with_data=with_data)
    with held(folder):
        check_may_write(folder, who, progress.round)
        state.save(folder, progress, who, beside=files)


def beside(federation: Federation, *, with_data: bool) -> dict[str, bytes | dict[str, Tensor]]:
    """Return the files of a saved fit beside its state: what its data look like, and the rows."""
    data = federation.data
    schema = {"names": list(data.names), "counts": data.counts.tolist(), **form_of(data)}
    schema |= {"client_column": data.client_column}
    schema |= {"start": start_of(federation), "dtype": str(torch.get_default_dtype())}
    schema |= {"sites": sites_of(federation.program)}
    files: dict[str, bytes | dict[str, Tensor]] = {SCHEMA: json.dumps(schema).encode()}
    if with_data:
        tensors = {f"field.{k}": v for k, v in data.fields.items()}
        tensors |= {f"client_field.{k}": v for k, v in data.client_fields.items()}
        if data.frame_rows is not None:
            tensors |= data.frame_rows.tensors()
        files[ROWS] = {**tensors, "offsets": data.offsets}
    return files


def check_may_write(folder: str | Path, about: Mapping[str, Any], round: int) -> None:
    """Refuse a folder in which a fit of `round` rounds would hide or remove what is there."""
    for path in state.checkpoints(folder):
        try:
            record = state.read_record(path)
        except state.CheckpointError:
            continue  # it is left as it is
        reason = None
        if not is_of(record.about, about):
            difference = compared(record.about, about).in_words
            reason = f"another run ({path.name}): it differs in {difference}"
        elif record.round > round:
            reason = f"this run after {record.round} rounds, and this fit has done {round}"
        if reason is not None:
            fix = "name another folder, or remove that run first"
            raise state.CheckpointError(f"'{folder}' holds {reason}; {fix}")


def start_of(federation: Federation) -> str:
    """Return a hash of all that a run starts from, to nine digits: what made-up rows give differs by rounding."""
    digest = hashlib.sha256()
    program = federation.program
    sites = {site.name: site.start for site in program.latents.sites}
    start = [list(program.start()), sites, federation.client.own, federation.server.state]
    for name, value in named_leaves(start).items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = torch.cat([value.detach().cpu().reshape(-1)])  # `view` needs its own, dense memory
        if flat.is_floating_point():
            flat = flat.double()
            largest = flat[flat.isfinite()].abs().max() if bool(flat.isfinite().any()) else 1.0
            flat = (flat / torch.as_tensor(largest).log2().floor().sub(DIGITS).exp2()).round()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sites_of(program: Program) -> dict[str, str]:
    """Return each latent site in words, by name, for a global one with its prior's densities; no row is read."""
    words = {}
    for site in program.latents.sites:
        place = "local" if site.is_local else "global"
        words[site.name] = f"{place}, {tuple(site.free_start.shape)}, {type(site.support).__name__}"
    block = program.latents.global_block
    with suppress(*FAILS, RowsNotSaved), trial():  # else it is known by its sites alone
        for away in PLACES:
            at = block.unflatten(torch.full((block.size,), away))[0]
            nodes = sites_at(program, at, in_double(program.prototype))
            for name, value in at.items():
                density = float(nodes[name]["fn"].log_prob(value).sum())
                words[name] += f", log density {density:.5g}"
    return words


@dataclass(frozen=True, eq=False)
class SavedData:
    """What a saved fit holds of its data: rows (None: not saved), schema (None: a checkpoint)."""

    data: ClientData | None
    schema: FitRecord | None

    def without_rows(self, fills: tuple[float, float]) -> ClientData:
        """Return the clients without rows; two numbers may stand in for their values."""
        schema: Any = self.schema or {}
        try:
            data = rows_absent(schema["names"], schema["counts"], schema, fills)
            return replace(data, client_column=schema["client_column"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            what = f"{SCHEMA} is not from this version of hierfl ({error})"
            raise state.CheckpointError(f"{what}: {HAND_IN}") from error


def newest_record(paths: list[Path]) -> tuple[Path, Record]:
    """Return the newest checkpoint whose record can be read, and the record."""
    reasons = []
    for path in reversed(paths):
        try:
            return path, state.read_record(path)
        except state.CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
    raise state.CheckpointError(f"no checkpoint can be read: {'; '.join(reasons)}")


def read(checkpoint: Path, record: Record) -> SavedData:
    """Read what a saved fit holds of its data, from the checkpoint that is loaded."""
    hashes, rows = record.hashes, None
    for name in (SCHEMA, ROWS):
        if name in hashes and not state.is_whole(checkpoint / name, hashes[name]):
            what = f"'{checkpoint / name}' is missing, truncated or changed"
            raise state.CheckpointError(f"{what}: {HAND_IN}")
    if SCHEMA not in hashes:
        return SavedData(None, None)
    try:
        schema = typed(FitRecord, read_json(checkpoint / SCHEMA), SCHEMA)
        if ROWS in hashes:
            rows = _client_data(schema, state.read_tensors(checkpoint / ROWS))
    except Exception as error:  # `ClientData` or torch raises at what does not fit
        what = f"'{checkpoint / SCHEMA}' or {ROWS} beside it cannot be read ({error})"
        raise state.CheckpointError(f"{what}: {HAND_IN}") from error
    return SavedData(rows, schema)


def _client_data(schema: Any, tensors: Mapping[str, Tensor]) -> ClientData:
    part: dict[str, dict[str, Tensor]] = {"field": {}, "client_field": {}, "frame": {}}
    for name, value in tensors.items():
        kind, _, key = name.partition(".")
        if name != "offsets":
            part[kind][key] = value
    offsets, names = tensors["offsets"], tuple(schema["names"])
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or int(offsets[0]) != 0:
        raise ValueError("the offsets of the clients' rows are not counts from 0")
    features, levels = labels_of(schema, "features"), labels_of(schema, "levels")
    frame = FrameRows.of_tensors(part["frame"]) if part["frame"] else None
    of_rows, of_clients, column = part["field"], part["client_field"], schema["client_column"]
    return ClientData(of_rows, offsets, names, of_clients, features, levels, frame, column)
