"""Programs of the zoo by name, and their rows as clients."""

from __future__ import annotations

import importlib
from typing import Any

import torch

import hierfl


def program_of(name: str) -> Any:
    """Return a program's module."""
    return importlib.import_module(f"benchmarks.zoo.programs.{name}")


def data_of(program: Any) -> hierfl.ClientData:
    """Return a program's rows."""
    rows = dict(program.rows())
    client, own = rows.pop("client"), rows.pop("of_clients", None)
    names = [f"c{k:03d}" for k in range(int(max(client)) + 1)]
    tensors = {n: torch.as_tensor(v) for n, v in rows.items()}
    typed: dict[str, Any] = {
        n: v.float() if v.is_floating_point() else v for n, v in tensors.items()
    }
    return hierfl.ClientData.from_arrays(client, names=names, client_fields=own, **typed)
