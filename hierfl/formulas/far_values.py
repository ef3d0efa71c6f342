"""Values of a client's rows that are too far from all clients' to be believed, such as a BMI of 270."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.formulas.columns import Column
from hierfl.formulas.schema import Schema

FAR = 8.0  # sds of the other rows, from their mean
SOME_ROWS = 10  # of a client, which tell that a column has two values


def warn_of_far_values(
    ready: pd.DataFrame, schema: Schema, names: Collection[str], client: str
) -> None:
    """Warn of numbers of a client's `prepared` rows that are far from those of all, without their values."""
    for name in names:
        column, values = schema.columns[name], ready[name].to_numpy()
        if column.kind != "number" or _has_two_values(column, values):
            continue
        count = int(is_far(values, column, schema.rows).sum())
        if count:
            warnings.warn(
                f"column '{name}' of client '{client}' has {count} "
                f"value{'s' if count > 1 else ''} more than {FAR:g} sds from the mean of all other "
                "rows: check the unit, and for typing errors",
                stacklevel=4,
            )


def is_far(values: NDArray[np.float64], column: Column, rows: int) -> NDArray[np.bool_]:
    """Return which values are far from the other rows' mean, in units of their sd, (n,).

    A value among the agreed rows is set aside: it moves their mean, and n rows hold none that is
    farther than sqrt(n) of their sds.
    """
    apart = np.abs(values - column.mean)
    others = (rows * column.sd**2 - apart**2 * rows / max(rows - 1, 1)) / max(rows - 1, 1)
    is_among = others > 1e-9 * column.sd**2  # else the others have no spread, or it is a new row
    sd = np.sqrt(np.where(is_among, others, column.sd**2))
    distance: NDArray[np.bool_] = (
        apart * np.where(is_among, rows / max(rows - 1, 1), 1.0) > FAR * sd
    )
    return distance


def _has_two_values(column: Column, values: NDArray[np.float64]) -> bool:
    """Return whether a column is of two values, one of which may be rare: 0 and 1, or others."""
    is_binary = math.isclose(column.sd**2 + column.mean**2, column.mean, rel_tol=1e-9)
    return is_binary or (len(values) >= SOME_ROWS and len(np.unique(values)) <= 2)
