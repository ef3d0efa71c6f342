"""What an answer of a fitted formula is: labeled draws, and their means, sds and intervals in a frame."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.intervals import percent, tails
from hierfl.core.tables import Shown, printed

if TYPE_CHECKING:
    from xarray import DataArray

    from hierfl.effects.drawn import CoefficientDraws

STATISTICS = ("mean", "sd", "low", "high")
Floats = NDArray[np.float64]


def ends(prob: float) -> str:
    """Return what `low` and `high` are, as a sentence."""
    return f"low and high are the ends of the {percent(prob)} interval."


@printed
@dataclass(frozen=True, eq=False)
class Estimates:
    """What a fitted formula says: labeled draws, and a table of them.

    Args:
        title: what is answered, and where.
        frame: one row per labeled entry, with `mean`, `sd`, `low` and `high`, the ends of the
            interval; `level` of a response in categories.
        draws: the draws of each row, an xarray.DataArray whose first dimensions are `chain` and
            `draw`, and the next the labels of the rows.
        prob: of the interval.
        seed: of the draws.
        note: how the table is to be read.
    """

    title: str
    frame: pd.DataFrame
    draws: Any
    prob: float
    seed: int
    note: str = ""

    def __tables__(self) -> Shown:
        title, frame = self.title, self.frame
        if "client" in frame and not frame["client"].any():
            title, frame = f"{title}, for the average client", frame.drop(columns="client")
        return Shown(title, frame, f"{ends(self.prob)} {self.note}".strip())

    @classmethod
    def of(
        cls,
        title: str,
        draws: "DataArray",
        coefficients: "CoefficientDraws",
        *,
        first: Sequence[str] = (),
        p: Any = None,
        index: str | None = None,
        **fields: Any,
    ) -> Self:
        """Return the answer of labeled draws, a row each between the columns `first` and `p`, named by `index`."""
        dims = [str(dim) for dim in draws.dims[2:]]
        places = [at.reshape(-1) for at in np.indices(draws.shape[2:])]
        labels = {dim: draws[dim].to_numpy()[at] for dim, at in zip(dims, places, strict=True)}
        values = statistics(torch.as_tensor(draws.to_numpy()[0]), coefficients.prob)
        ordered = [dim for dim in first if dim in dims] + [dim for dim in dims if dim not in first]
        frame = pd.DataFrame({**{dim: labels[dim] for dim in ordered}, **values})
        frame = frame if p is None else frame.assign(p=p)
        frame = frame if index is None else frame.set_index(index).rename_axis(None)
        return cls(title, frame, draws, coefficients.prob, coefficients.seed, **fields)


def statistics(draws: Tensor, prob: float) -> dict[str, Floats]:
    """Return mean, sd and interval of each entry of draws (S, ...), as columns."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    low, high = np.quantile(values, tails(prob), axis=0)
    columns = (values.mean(0), values.std(0, ddof=1), low, high)
    return dict(zip(STATISTICS, columns, strict=True))


def share_above(draws: Tensor, edge: float) -> Floats:
    """Return the share of draws above an edge, of each entry; draws on it count half."""
    values = draws.detach().double().numpy().reshape(len(draws), -1)
    shares: Floats = (values > edge).mean(0) + 0.5 * (values == edge).mean(0)
    return shares


def labeled(draws: Tensor, dims: Mapping[str, Sequence[Any]], name: str) -> "DataArray":
    """Return draws (S, ...) with ArviZ's `chain` and `draw`, then the `dims` but {"level": ("",)}."""
    import xarray  # slow to import

    coordinates = {
        dim: labels for dim, labels in dims.items() if dim != "level" or tuple(labels) != ("",)
    }
    values = draws.detach().double().numpy().reshape(1, len(draws), *map(len, coordinates.values()))
    coords = {"chain": [0], "draw": np.arange(len(draws))}
    coords |= {dim: np.array(list(labels)) for dim, labels in coordinates.items()}
    return xarray.DataArray(values, coords, ["chain", "draw", *coordinates], name=name)
