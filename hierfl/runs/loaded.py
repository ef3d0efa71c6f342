"""The federation of a fit that is loaded without its clients' rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from hierfl.data.absent import FILLS, RowsNotSaved, stand_in
from hierfl.data.clients import ClientData
from hierfl.engine.federation import Federation
from hierfl.runs.checkpoint import CheckpointError
from hierfl.runs.saved import HAND_IN, SavedData, start_of


def without_rows(
    found: SavedData, folder: str, federated: Callable[[ClientData], Federation]
) -> Federation:
    """Read the program of a fit with values in place of its rows; what needs the rows fails later.

    Raises:
        RowsNotSaved: the rows are needed here already: this is a checkpoint of a run, or the
            program cannot be read without them, or what it starts from depends on them.
        CheckpointError: torch's default dtype is not that of the fit.
    """
    if found.schema is None:
        raise RowsNotSaved(f"'{folder}' was saved without the clients' rows: {HAND_IN}")
    dtype = str(torch.get_default_dtype())
    if found.schema["dtype"] != dtype:
        raise CheckpointError(
            f"'{folder}' is of a fit in {found.schema['dtype']}, and torch's default is {dtype}: "
            f"call torch.set_default_dtype({found.schema['dtype']}) first"
        )
    for fills in FILLS:
        data = found.without_rows(fills)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the fit itself, said when it was made
                federation = federated(stand_in(data, 0))
        except ValueError:  # labels outside their support, for example
            continue
        if start_of(federation) == found.schema["start"]:
            return replace(federation, data=data)
    raise RowsNotSaved(
        f"'{folder}' was saved without the clients' rows, and its program cannot be read without "
        f"them: {HAND_IN}"
    )
