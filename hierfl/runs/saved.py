"""A fit on disk: private data of the clients are in files of their own, named `local`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hierfl.data.clients import ClientData
from hierfl.engine.federation import Federation
from hierfl.engine.rounds import Progress
from hierfl.runs import checkpoint as state
from hierfl.runs.records import checked_schema, digest, read_json

ROWS_FILE, SCHEMA_FILE = "local-rows.safetensors", "fit.json"


def write(
    folder: str | Path,
    progress: Progress,
    who: Mapping[str, Any],
    federation: Federation,
    *,
    with_data: bool,
) -> None:
    """Write a fit: `fit.json`, a checkpoint, and `local-rows.safetensors` with the clients' rows.

    Args:
        folder: made if it does not exist.
        progress: where the run stands.
        who: what identifies the run (`hierfl.engine.federation.about`).
        federation: with the clients' rows.
        with_data: write the clients' rows.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    data = federation.data
    state.save(root, progress, who)
    schema = {
        "names": list(data.names),
        "features": {name: list(labels) for name, labels in data.features.items()},
        "levels": {name: list(labels) for name, labels in data.levels.items()},
    }
    (root / SCHEMA_FILE).write_text(json.dumps({**schema, "sha256": digest(schema)}))
    (root / ROWS_FILE).unlink(missing_ok=True)  # of an earlier fit in this folder
    if with_data:
        tensors = {f"field.{k}": v.contiguous() for k, v in data.fields.items()}
        tensors |= {f"client_field.{k}": v.contiguous() for k, v in data.client_fields.items()}
        save_file({**tensors, "offsets": data.offsets}, root / ROWS_FILE)


def newest_record(found: list[Path]) -> dict[str, Any]:
    """Return the record of the newest checkpoint whose record can be read.

    Args:
        found: folders of checkpoints, oldest first.

    Raises:
        CheckpointError: no record can be read.
    """
    reasons = []
    for path in reversed(found):
        try:
            return state.read_record(path)
        except state.CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
    raise state.CheckpointError(f"no checkpoint can be read: {'; '.join(reasons)}")


def read_rows(root: Path) -> ClientData:
    """Read the clients' rows that were saved with a fit.

    Raises:
        FileNotFoundError: the fit was saved without them.
        CheckpointError: a file is damaged.
    """
    path = root / ROWS_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"'{root}' was saved without the clients' rows: pass them, load(..., data=...)"
        )
    try:
        schema = checked_schema(read_json(root / SCHEMA_FILE))
        return _client_data(schema, state.read_tensors(path))
    except (
        Exception
    ) as error:  # whatever the rows are, `ClientData` or torch raises at what does not fit
        raise state.CheckpointError(
            f"'{path}' or {SCHEMA_FILE} beside it is truncated or changed ({error}): pass the rows, "
            f"load(..., data=...)"
        ) from error


def _client_data(schema: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClientData:
    """Put the rows together again."""
    part: dict[str, dict[str, Tensor]] = {"field": {}, "client_field": {}}
    for name, value in tensors.items():
        kind, _, key = name.partition(".")
        if name != "offsets":
            part[kind][key] = value
    offsets = tensors["offsets"]
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or int(offsets[0]) != 0:
        raise ValueError("the offsets of the clients' rows are not counts from 0")
    return ClientData(
        fields=part["field"],
        offsets=offsets,
        names=tuple(schema["names"]),
        client_fields=part["client_field"],
        features={name: tuple(labels) for name, labels in schema["features"].items()},
        # fits of 0.1.0 have no levels
        levels={name: tuple(labels) for name, labels in schema.get("levels", {}).items()},
    )
