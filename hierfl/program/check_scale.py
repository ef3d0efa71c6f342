"""A warning of columns that are far from unit scale, which default priors and step sizes assume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.program.handlers import untouched_store
from hierfl.program.prior_center import Center
from hierfl.program.program import Program

FAR = 1000.0  # of mean or standard deviation; units such as years and kilograms stay below


def warn_of_unscaled(program: Program, data: ClientData) -> None:
    """Warn of columns that the model reads as numbers and whose mean or sd exceeds `FAR`.

    Labels are left out, unless their site observes any real number. Integers that the model uses as an index
    are left out.

    Args:
        program: that reads the data.
        data: the clients' rows.
    """
    for name in sorted(program.reads.model & set(data.fields)):
        support = program.supports.get(name, ("", constraints.real))[1]
        if support is not constraints.real or data.fields[name].dim() > 2:
            continue
        found = list(_far(data, name))
        if found and _is_number(program, name):
            more = f", and {len(found) - 1} more columns" if len(found) > 1 else ""
            warnings.warn(
                f"{found[0]}{more}: default priors and step sizes are for columns of about unit scale; scale "
                f"it, hierfl.standardize(train, test, fields=('{name}',))",
                stacklevel=3,
            )


def _far(data: ClientData, name: str) -> Iterator[str]:
    """Yield the columns of a field that are far from unit scale, in words."""
    values = data.fields[name]
    if values.dtype == torch.bool or len(values) < 2:
        return
    columns = values if values.dim() == 2 else values[:, None]
    low, high = columns.aminmax(dim=0)
    largest: Tensor = torch.maximum(low.double().abs(), high.double().abs())
    for j in (
        (largest > FAR).nonzero()[:, 0].tolist()
    ):  # the mean and sd of the others are smaller still
        column = columns[:, j].double()
        mean, sd = column.mean().item(), column.std().item()
        if max(abs(mean), sd) > FAR:
            named = data.features.get(name)
            which = f"field '{name}'"
            if values.dim() == 2:
                which = f"column '{named[j]}' of {which}" if named else f"column {j} of {which}"
            yield f"{which} has mean {mean:,.6g} and sd {sd:,.6g}"


def _is_number(program: Program, name: str) -> bool:
    """Return whether the model runs on the field as floats, which cannot be an index."""
    batch: ClientBatch = program.prototype
    values = batch.fields[name]
    if values.is_floating_point():
        return True
    floats = replace(batch, fields={**batch.fields, name: values.to(batch.counts.dtype)})
    try:
        with untouched_store(), Center():
            poutine.trace(program.model).get_trace(floats)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True
