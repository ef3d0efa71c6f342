"""A fit on disk: `fit.save(folder)`, `load(folder)`. What is the clients' own lies apart, under files named `local`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hierfl import state
from hierfl.data import ClientData
from hierfl.engine import Federation, begin
from hierfl.fitted import Fit
from hierfl.fitting import about, federate
from hierfl.method import Method
from hierfl.recipes import remake

ROWS, SCHEMA = "local-rows.safetensors", "fit.json"


def save(fit: Fit, folder: str | Path, *, with_data: bool) -> None:
    """Write a fit: `fit.json`, a checkpoint, and with the data `local-rows.safetensors`."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    data = fit.federation.data
    state.save(root, fit.progress, about(fit.method, fit.federation, fit.rounds, "federated"))
    schema = {
        "names": list(data.names),
        "features": {name: list(labels) for name, labels in data.features.items()},
        "population": fit.program.num_clients,
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    (root / SCHEMA).write_text(json.dumps(schema))
    if with_data:
        tensors = {f"field.{k}": v.contiguous() for k, v in data.fields.items()}
        tensors |= {f"client_field.{k}": v.contiguous() for k, v in data.client_fields.items()}
        save_file({**tensors, "offsets": data.offsets}, root / ROWS)


def load(folder: str | Path, *, method: Method | None = None, data: ClientData | None = None) -> Fit:
    """Read a fit that `Fit.save`, or a checkpoint of `fit`, has written.

    Args:
        folder: of the fit or the run.
        method: what was fitted; None: made again from its record, for methods, models and guides of hierfl and functions of
            modules that are imported already.
        data: the clients' training rows; None: those saved with it.

    Raises:
        CheckpointError: no whole checkpoint is there, or it is of another method or other clients.
        CannotRemake: the method cannot be made again: hand it in.
        FileNotFoundError: the rows were not saved: hand them in.
    """
    root = Path(folder)
    found = state.checkpoints(root)
    if not found:
        raise state.CheckpointError(f"'{folder}' holds no hierfl run")
    who = _newest_record(found)["about"]
    data = _rows(root) if data is None else data
    method = remake(who["method"]) if method is None else method
    federation: Federation = federate(method, data, seed=who["seed"])
    progress = state.load(root, begin(federation), {k: who[k] for k in ("rows", "clients", "fields")} if data is None else None)
    return Fit(method, federation, progress, who["rounds"])


def _newest_record(found: list[Path]) -> dict[str, Any]:
    reasons = []
    for path in reversed(found):
        try:
            return state.read_record(path)
        except state.CheckpointError as error:
            reasons.append(f"{path.name}: {error}")
    raise state.CheckpointError(f"no checkpoint can be read: {'; '.join(reasons)}")


def _rows(root: Path) -> ClientData:
    path = root / ROWS
    if not path.exists():
        raise FileNotFoundError(f"'{root}' was saved without the clients' rows: hand them in, load(..., data=...)")
    schema, tensors = json.loads((root / SCHEMA).read_text()), load_file(path)
    part = {"field": {}, "client_field": {}}  # type: dict[str, dict[str, torch.Tensor]]
    for name, value in tensors.items():
        kind, _, key = name.partition(".")
        if key:
            part[kind][key] = value
    return ClientData(
        fields=part["field"],
        offsets=tensors["offsets"],
        names=tuple(schema["names"]),
        client_fields=part["client_field"],
        features={name: tuple(labels) for name, labels in schema["features"].items()},
    )
