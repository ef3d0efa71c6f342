"""Clients with too few rows to take part in a fit."""

from __future__ import annotations

import warnings
from dataclasses import replace

from hierfl.data.clients import ClientData
from hierfl.runs.call import Call

NAMED = 5  # clients in a warning


def with_rows(data: ClientData, call: Call) -> tuple[ClientData, Call]:
    """Return clients with `min_rows` rows or more, and the call for them; a warning names the others.

    Raises:
        ValueError: no client has as many rows.
    """
    least, validation = call.settings.min_rows, call.validation
    few = [name for name, n in zip(data.names, data.counts.tolist(), strict=True) if n < least]
    if not few:
        return data, call
    if len(few) == data.num_clients:
        raise ValueError(
            f"min_rows is {least}, and no client has as many rows: the most are "
            f"{int(data.counts.max())}"
        )
    more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
    warnings.warn(
        f"{len(few)} of {data.num_clients} clients have fewer than {least} rows and take no part: "
        f"{', '.join(few[:NAMED])}{more}; fit.personalize(rows) fits their own parameters locally",
        stacklevel=3,
    )
    if validation is not None:
        call = replace(call, validation=_without(validation, few))
    return _without(data, few), call


def _without(data: ClientData, names: list[str]) -> ClientData:
    return data.select([name for name in data.names if name not in set(names)])
