"""`pyro.factor` as a likelihood: which factors of a model are terms of its rows, and not of its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine

from hierfl.data.batch import DATA, ClientBatch
from hierfl.program.prior_center import Center
from hierfl.program.sites import Model
from hierfl.program.traces import Site, in_clients, is_factor, samples


def likelihood_factors(model: Model, trace: Any, batch: ClientBatch) -> dict[str, bool]:
    """Return the factors that are likelihood terms: those inside the data plate, and those that read rows.

    A factor inside the clients plate that reads no field with one value a row belongs to the prior of the
    client's local sites.

    Args:
        model: the generative program.
        trace: of the model on the batch.
        batch: a few rows.

    Returns:
        Factor -> whether it has one value a row; else it has one a client.
    """
    found = {name: site for name, site in samples(trace) if is_factor(site) and in_clients(site)}
    of_rows = {
        name: any(frame.name == DATA for frame in site["cond_indep_stack"])
        for name, site in found.items()
    }
    of_clients = {name: site for name, site in found.items() if not of_rows[name]}
    reading = _reading_rows(model, of_clients, batch) if of_clients else set()
    return {name: rows for name, rows in of_rows.items() if rows or name in reading}


def _reading_rows(model: Model, factors: Mapping[str, Site], batch: ClientBatch) -> set[str]:
    """Return the factors that change with a field of rows, found by changing one field at a time."""
    reading: set[str] = set()
    for name, field in batch.fields.items():
        other = ~field if field.dtype == torch.bool else field + 1
        changed = replace(batch, fields={**batch.fields, name: other})
        try:
            with Center():
                nodes: dict[str, Site] = poutine.trace(model).get_trace(changed).nodes
        except (RuntimeError, ValueError, IndexError):
            continue  # the model fails on a changed field, such as an index
        reading |= {
            factor
            for factor, site in factors.items()
            if not torch.equal(
                torch.as_tensor(nodes[factor]["fn"].log_prob(nodes[factor]["value"])),
                torch.as_tensor(site["fn"].log_prob(site["value"])),
            )
        }
    return reading
