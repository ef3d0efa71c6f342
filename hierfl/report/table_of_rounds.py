"""The table of rounds of a method that has no ELBO."""

from __future__ import annotations

import math

import pandas as pd

from hierfl.core.importance_sampling import K_HAT
from hierfl.diagnostics.thresholds import R_HAT
from hierfl.diagnostics.wording import number
from hierfl.report.blocks import Table

COLUMNS = {
    "moved": "Means moved, SD",
    "changed": "SDs changed, share",
    "r_hat": "R-hat",
    "k_hat": "k-hat",
    "effective": "Effective draws",
}
NOTES = {
    "moved": "Means moved: the largest shift of a mean since the round before, in posterior SDs.",
    "changed": "SDs changed: the largest relative change of an SD.",
    "r_hat": f"R-hat: split R-hat of the server's chains; below {R_HAT} they have mixed.",
    "k_hat": f"k-hat: Pareto shape of the importance weights; below {K_HAT} they can be trusted.",
    "effective": "Effective draws: 1 / the sum of squared weights.",
}


def table_of_rounds(history: pd.DataFrame) -> Table | None:
    """Tabulate how far the posterior moved in each round; None if that is not logged.

    A number that a round has carried over from the round before is left out.
    """
    columns = [name for name in COLUMNS if name in history]
    if not {"moved", "k_hat"} & set(columns):
        return None
    rows, before = [], dict.fromkeys(columns, math.nan)
    for place, record in enumerate(history[columns].to_dict("records")):
        cells = [
            "" if math.isnan(value) or value == before[name] else number(value)
            for name, value in ((name, float(record[name])) for name in columns)
        ]
        before = {name: float(record[name]) for name in columns}
        rows.append((str(place + 1), *cells))
    return Table(
        "What changed in each round",
        ("Round", *(COLUMNS[name] for name in columns)),
        tuple(rows),
        note=" ".join(NOTES[name] for name in columns),
    )
