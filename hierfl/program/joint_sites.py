"""Observed sites with one density for all rows of a client, which lie outside the data plate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from pyro import poutine
from torch import Tensor

from hierfl.data.batch import ClientBatch
from hierfl.program.handlers import untouched_store
from hierfl.program.program import ProgramError
from hierfl.program.sites import Model
from hierfl.program.traces import (
    Center,
    Site,
    in_clients,
    in_data,
    samples,
)


def joint_sites(
    model: Model, outside: Mapping[str, Site], batch: ClientBatch, labels: Mapping[str, str]
) -> dict[str, bool]:
    """Return those of the sites observed `outside` of the data plate that have one density for all rows.

    The value is whether it is by row; the mask must be asked for.
    """
    by_rows: dict[str, bool] = {}
    for name, site in outside.items():
        if labels.get(name) in batch.fields:
            clients, *row = batch.fields[labels[name]].shape
            by_rows[name] = [*site["value"].shape] == [clients, 1, *row]  # as of `batch.packed`
    if len(by_rows) < len(outside):
        joint = by_rows.keys() | _depend_on_rows(model, batch)
        by_rows = {name: by_rows.get(name, False) for name in outside if name in joint}
    if by_rows and not _asks_for_mask(model, batch):
        name = next(name for name in outside if name in by_rows)
        raise ProgramError(
            f"site '{name}' is observed inside batch.clients() but outside batch.data(), and reads "
            "the client's rows, so that padded rows would count as data: open batch.data() around "
            "it, or leave them out by batch.joint_normal, batch.sum, batch.mean or batch.mask() "
            "(one value per client belongs in client_fields=)"
        )
    return by_rows


def _depend_on_rows(model: Model, batch: ClientBatch) -> set[str]:
    """Return the local sites whose log density depends on a field of rows."""
    order = torch.arange(batch.num_rows - 1, 0, -1)
    # gradients find what other rows do not change (a mean of equal ones); other rows find integers
    marked, less = {}, {}
    for name, v in batch.fields.items():
        marked[name] = v.detach().clone().requires_grad_() if v.is_floating_point() else v
        less[name] = v.index_select(1, order)
    other = replace(batch, fields=less, rows=batch.mask().index_select(1, order))
    with untouched_store(), torch.enable_grad():
        of_marked = _densities(model, replace(batch, fields=marked))
        of_other = _densities(model, other)
    names = set()
    for name, value in of_marked.items():
        if value.requires_grad or not torch.equal(value, of_other.get(name, value)):
            names.add(name)
    return names


def _densities(model: Model, batch: ClientBatch) -> dict[str, Tensor]:
    """Return the log densities of local sites outside the data plate; none if the model fails."""
    try:
        with Center():
            trace = poutine.trace(model).get_trace(batch)
    except Exception:  # whatever a user's model raises, such as where it leaves autograd
        return {}
    sites = {n: s for n, s in samples(trace) if in_clients(s) and not in_data(s)}
    return {name: site["fn"].log_prob(site["value"]) for name, site in sites.items()}


@dataclass(frozen=True, eq=False)
class _Watched(ClientBatch):
    """A batch that records whether it is asked for its mask."""

    asked: list[bool] = field(default_factory=list)

    def mask(self) -> Tensor:
        self.asked.append(True)
        return super().mask()


def _asks_for_mask(model: Model, batch: ClientBatch) -> bool:
    fields = {name: getattr(batch, name) for name in ClientBatch.__dataclass_fields__}
    watched = _Watched(**fields)
    with untouched_store(), Center():
        poutine.trace(model).get_trace(watched)
    return bool(watched.asked)
