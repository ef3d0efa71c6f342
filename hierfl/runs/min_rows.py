"""Clients with too few rows to take part in a fit."""

from __future__ import annotations

import warnings

from hierfl.data.clients import ClientData

NAMED = 5  # clients in a warning


def with_rows(
    data: ClientData, validation: ClientData | None, least: int
) -> tuple[ClientData, ClientData | None]:
    """Return the clients with at least so many rows, and their held-out rows; a warning names the others.

    Args:
        data: the clients' training rows.
        validation: rows of the same clients, or None.
        least: training rows, 1 or more.

    Raises:
        ValueError: `least` is below 1, or no client has as many rows.
    """
    if least < 1:
        raise ValueError(f"min_rows is {least}: it must be 1 or more")
    few = [name for name, n in zip(data.names, data.counts.tolist(), strict=True) if n < least]
    if not few:
        return data, validation
    if len(few) == data.num_clients:
        raise ValueError(
            f"min_rows is {least}, and no client has as many rows: the most are {int(data.counts.max())}"
        )
    more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
    warnings.warn(
        f"{len(few)} of {data.num_clients} clients have fewer than {least} rows and take no part: "
        f"{', '.join(few[:NAMED])}{more}; fit.personalize(rows) infers their own numbers at home",
        stacklevel=3,
    )
    return _without(data, few), None if validation is None else _without(validation, few)


def _without(data: ClientData, names: list[str]) -> ClientData:
    return data.select([name for name in data.names if name not in set(names)])
