"""Marginal means, under emmeans' name: the response at each value of a column, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.intervals import PROB
from hierfl.core.tables import Shown, shown_as
from hierfl.effects.comparisons import comparisons
from hierfl.effects.contrasts import as_contrasts
from hierfl.effects.drawn import Drawn
from hierfl.effects.intervals import ends
from hierfl.effects.predictions import predictions
from hierfl.posterior.snapshot import Snapshot

if TYPE_CHECKING:
    from xarray import DataArray


def _shown(found: MarginalMeans) -> Shown:
    tables = (("Means", found.frame), ("Differences; p is P(difference > 0)", found.differences))
    return Shown(found.title, None, ends(found.prob), tables)


@shown_as(_shown)
@dataclass(frozen=True, eq=False)
class MarginalMeans:
    """The response at each value of one column, averaged over the rows of all clients.

    Args:
        title: what is averaged.
        variable: the column.
        frame: one row per value and level of the response: the column `variable`, `level` of a
            response in categories, `mean`, `sd`, `low` and `high`, the ends of the interval.
        differences: one row per pair of values, with `contrast` and `p`, as in `contrasts`: average
            effects of the column.
        draws: the draws of each mean, an xarray.DataArray of the dimensions `chain`, `draw`, the
            column, and `level` of a response in categories.
        prob: of the intervals.
    """

    title: str
    variable: str
    frame: pd.DataFrame
    differences: pd.DataFrame
    draws: DataArray
    prob: float


@spelled
def marginal_means(
    fit: Snapshot | Drawn,
    variable: str,
    rows: Any = None,
    *,
    values: Sequence[Any] | None = None,
    prob: float = PROB,
    draws: int = 1000,
    seed: int = 0,
) -> MarginalMeans:
    """Return the response at each value of one column, averaged over all clients' rows, and their differences.

    It is `predictions` of the column, and `comparisons` of its values over the same rows.

    Args:
        fit: of a `hierfl.formula`, with the clients' rows.
        variable: a column that the formula reads.
        rows: frames of fitted clients, as `hierfl.fit` takes them. Default None: the rows of the
            fit, which suffice where no term reads another column beside `variable`.
        values: of the column. Default None: all levels; of a number its mean, and one sd below and
            above it.
        prob: of the intervals.
        draws: S, of the posterior.
        seed: of the draws.

    Errors are those of `predictions`.
    """
    over: Any = "rows" if rows is None else rows
    how: Any = {"prob": prob, "draws": draws, "seed": seed}
    means = predictions(fit, variable, over, values=values, **how)
    several = list(means.draws[variable].values)
    apart = comparisons(fit, variable, over, values=several, **how).frame
    return MarginalMeans(
        title=means.title,
        variable=variable,
        frame=means.frame,
        differences=as_contrasts(apart).drop(columns="client", errors="ignore"),
        draws=means.draws,
        prob=prob,
    )
