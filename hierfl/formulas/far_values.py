"""Values of a client's rows that are too far from all clients' to be believed, such as a BMI of 270."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hierfl.formulas.columns import Column
from hierfl.formulas.schema import Schema

Floats = NDArray[np.float64]
FAR = 8.0  # sds of the other rows, from their mean
FAR_LOGS = (
    5.0  # of a client's values above 0, if none is below it, whose logarithms must be far out too
)
SOME_ROWS = 10  # of a client, which tell of two values, and of a long tail


def warn_of_far_values(
    columns: Mapping[str, Floats], schema: Schema, clients: Sequence[str], counts: NDArray[np.int64]
) -> None:
    """Warn of numbers of clients' rows, one client after another, that are far from all, without their values."""
    owner = np.repeat(np.arange(len(clients)), counts)
    for name, every in sorted(columns.items()):
        column = schema.columns[name]
        far_rows = is_far(every, column.mean, column.sd, schema.rows, FAR)
        for place in np.unique(owner[far_rows]).tolist():
            values = every[owner == place]
            values = values[~np.isnan(values)]
            if _has_two_values(column, values):
                continue
            far = is_far(values, column.mean, column.sd, schema.rows, FAR)
            if values.min() >= 0.0 and (values > 0.0).sum() >= SOME_ROWS:
                # incomes and counts have long tails; far values are above 0
                logs = np.log(values[values > 0.0])
                far[values > 0.0] &= is_far(logs, logs.mean(), logs.std(), len(logs), FAR_LOGS)
            if count := int(far.sum()):
                many = f"{count} value{'s' if count > 1 else ''} more than {FAR:g} sds"
                what = (
                    f"column '{name}' of client '{clients[place]}' has {many} from the mean of all"
                )
                fix = "check the unit, and for typing errors"
                warnings.warn(f"{what} other rows: {fix}", stacklevel=4)


def is_far(
    values: NDArray[np.float64], mean: float, sd: float, rows: int, times: float
) -> NDArray[np.bool_]:
    """Return which values are more than so many sds of the other rows from their mean, (n,).

    A value is set aside, since n rows hold none that is farther than sqrt(n) of their own sds.
    """
    distance, ratio = np.abs(values - mean), rows / max(rows - 1, 1)
    others = ratio * (sd**2 - distance**2 / max(rows - 1, 1))
    is_among = others > 1e-9 * sd**2  # else the others have no spread, or it is a new row
    spread = np.sqrt(np.where(is_among, others, sd**2))
    far: NDArray[np.bool_] = distance * np.where(is_among, ratio, 1.0) > times * spread
    return far


def _has_two_values(column: Column, values: NDArray[np.float64]) -> bool:
    """Return whether a column is of two values, one of which may be rare: 0 and 1, or others."""
    is_binary = math.isclose(column.sd**2 + column.mean**2, column.mean, rel_tol=1e-9)
    return is_binary or (len(values) >= SOME_ROWS and len(np.unique(values)) <= 2)
