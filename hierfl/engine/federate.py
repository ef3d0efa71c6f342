"""From a method and data to a federation: the program checked, the cohort's size settled, the run identified."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hierfl.core.device import device_of
from hierfl.data.clients import ClientData
from hierfl.engine.federation import Federation
from hierfl.method import Method
from hierfl.program.read import read
from hierfl.program.recipes import describe


def federate(
    method: Method,
    data: ClientData,
    *,
    seed: int = 0,
    cohort: int | float | None = None,
    engine: str = "vectorised",
    chunk: int | None = None,
    device: str | torch.device = "cpu",
) -> Federation:
    """Check a method's program against the data, and set up what stays the same from round to round."""
    if engine not in ("vectorised", "sequential", "pooled"):
        raise ValueError(f"there is no engine '{engine}': vectorised, sequential or pooled")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be 1 or more")
    size = cohort_size(cohort, data.num_clients)
    if method.everyone and size < data.num_clients:
        raise ValueError(
            f"{method.name} adds up what all clients send in each round: a cohort of {size} of {data.num_clients} cannot stand in "
            f"for them; leave cohort=None, or take a method of many small rounds (fedsvi)"
        )
    program = read(method.model, method.guide, data, seed=seed)
    return Federation(
        program=program,
        client=method.client(program),
        server=method.server(program),
        data=data,
        seed=seed,
        cohort=size,
        engine="sequential" if engine == "sequential" else "vectorised",
        chunk=chunk,
        device=device_of(device),
    )


def cohort_size(cohort: int | float | None, population: int) -> int:
    """Clients a round: all, a count, or a share of them (at least one).

    Raises:
        ValueError: none, or more than there are.
    """
    if cohort is None:
        return population
    if isinstance(cohort, float):
        if not 0.0 < cohort <= 1.0:
            raise ValueError(f"cohort is {cohort}: a share of the clients lies in (0, 1]; for a count give an integer")
        return max(1, round(cohort * population))
    if not 1 <= cohort <= population:
        raise ValueError(f"a cohort of {cohort} cannot be drawn from {population} clients")
    return cohort


def about(method: Method, federation: Federation, rounds: int) -> dict[str, Any]:
    """What identifies a run: a checkpoint of another one is refused."""
    data = federation.data
    return {
        "method": describe(method),
        "rounds": rounds,
        "seed": federation.seed,
        "cohort": federation.cohort,
        "clients": hashlib.sha256("\n".join(data.names).encode()).hexdigest(),
        "fields": {name: [str(v.dtype), *v.shape[1:]] for name, v in {**data.fields, **data.client_fields}.items()},
        "rows": _digest([data.counts, *_by_name(data.fields), *_by_name(data.client_fields)]),
    }


def _by_name(fields: Mapping[str, Tensor]) -> list[Tensor]:
    return [fields[name] for name in sorted(fields)]


def _digest(tensors: list[Tensor]) -> str:
    """A hash of what tensors hold, so that another split of the same rows is told apart."""
    found = hashlib.sha256()
    for values in tensors:
        found.update(values.contiguous().numpy().tobytes())
    return found.hexdigest()
