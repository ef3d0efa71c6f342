"""Rows made ready: frames read, columns standardized and filled, by statistics of each client's own rows.

Clients send counts, means and sums of squares, no rows (merged as by Chan et al. 1983).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hierfl.core.arguments import NoSuchName, spelled
from hierfl.core.tables import Shown, printed
from hierfl.data.batch import expect_client_data
from hierfl.data.clients import ClientData
from hierfl.data.consistency import expect_list, field_of, is_frame
from hierfl.data.frames import FrameRows

BLOCK = 2**21  # values of clients whose moments are taken together; 16 MiB in float64


@dataclass(frozen=True, eq=False)
class FieldMoments:
    """Count, mean and sum of squares about it, (N, ...) float64, of values that are not NaN."""

    count: Tensor
    mean: Tensor
    square: Tensor


@printed
@dataclass(frozen=True, eq=False)
class Scaling:
    """The affine map `(x - mean) / sd` of each feature of a field; sd is 1 for a constant feature.

    Args:
        field: name of the field.
        mean: (...) of the shape of a row.
        sd: (...) of the shape of a row, > 0.
    """

    field: str
    mean: Tensor
    sd: Tensor

    def __tables__(self) -> Shown:
        import pandas as pd  # slow to import

        mean, sd = (v.reshape(-1).tolist() for v in (self.mean, self.sd))
        return Shown(f"Scaling of '{self.field}'", pd.DataFrame({"mean": mean, "sd": sd}))

    def apply(self, data: ClientData) -> ClientData:
        """Return the clients with the field scaled; NaN stays NaN.

        Raises:
            KeyError: there is no such field.
            ValueError: the rows have another shape than those that the scaling was fitted to.
        """
        values = _field(data, self.field)
        if values.shape[1:] != self.mean.shape:
            what = f"a row of '{self.field}' has shape {tuple(values.shape[1:])}, but the scaling"
            fix = "give the same columns"
            raise ValueError(f"{what} was fitted to rows of shape {tuple(self.mean.shape)}: {fix}")
        # In float64, because far from 0 the subtraction cancels most digits.
        scaled = (values.double() - self.mean.double()).div_(self.sd.double())
        return data.with_fields(**{self.field: scaled})


def client_moments(data: ClientData, field: str = "x") -> FieldMoments:
    """Return each client's statistics of a field: count, mean and sum of squares per feature."""
    values = _field(data, field)
    infinite = values.isinf().reshape(len(values), -1).any(1).nonzero()
    if len(infinite):
        name = data.names[int(data.row_client[int(infinite[0])])]
        fix = "correct it, or make it NaN if it is missing"
        raise ValueError(f"field '{field}' of client '{name}' has an infinite value: {fix}")
    # Clients in blocks, so that the float64 copies stay small beside the rows.
    block = data.offsets[:-1] * values[0].numel() // BLOCK
    clients = block.unique_consecutive(return_counts=True)[1].tolist()
    rows = [int(counts.sum()) for counts in data.counts.split(clients)]
    blocks = zip(values.split(rows), data.row_client.split(rows), clients, strict=True)
    moments = [_moments(own, owner - owner[0], number) for own, owner, number in blocks]
    return FieldMoments(*map(torch.cat, zip(*moments, strict=True)))


def _moments(values: Tensor, client: Tensor, clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squares of each client's rows, (clients, ...)."""
    values = values.double()
    seen = ~values.isnan()
    zeros = torch.zeros(clients, *values.shape[1:], dtype=torch.float64)
    count = zeros.index_add(0, client, seen.double())
    # In two passes: the difference of raw sums of squares cancels for values far from 0.
    mean = zeros.index_add(0, client, values.nan_to_num(0.0)) / count.clamp(min=1.0)
    deviation = torch.where(seen, values - mean[client], 0.0)
    mean = mean + zeros.index_add(0, client, deviation) / count.clamp(min=1.0)
    deviation = torch.where(seen, values - mean[client], 0.0)
    return count, mean, zeros.index_add(0, client, deviation**2)


def merged(moments: FieldMoments) -> FieldMoments:
    """Merge the moments of the clients, (N, ...), to those of all rows together, (...)."""
    count = moments.count.sum(0)
    mean = (moments.count * moments.mean).sum(0) / count.clamp(min=1.0)
    between = (moments.count * (moments.mean - mean) ** 2).sum(0)
    return FieldMoments(count, mean, moments.square.sum(0) + between)


def fit_scaling(train: ClientData, field: str = "x") -> Scaling:
    """Return the scaling by mean and sd (ddof 0) over all rows of `train`; a constant feature has sd 1."""
    total = merged(client_moments(train, field))
    sd = (total.square / total.count.clamp(min=1.0)).sqrt()
    kind = _field(train, field).dtype
    precision = torch.finfo(kind if kind.is_floating_point else torch.float64).eps
    constant = sd <= 8.0 * precision * total.mean.abs()
    dtype = torch.get_default_dtype()
    return Scaling(field, total.mean.to(dtype), torch.where(constant, 1.0, sd).to(dtype))


@spelled
def standardize(
    train: ClientData, *others: ClientData, fields: Sequence[str] = ("x",)
) -> tuple[ClientData, ...]:
    """Scale fields to mean 0 and sd 1 on `train`, and `others` by the same means and sds.

    To keep the scaling for later data, use `fit_scaling` and `Scaling.apply` instead.

    Args:
        train: the clients to compute means and sds from.
        *others: further data to scale, such as test rows or new clients.
        fields: names of the fields to scale.

    Raises:
        KeyError: there is no such field.
        ValueError: a value of `train` is infinite, or rows of `others` have another shape.

    >>> train = ClientData.from_arrays([0, 0, 1], x=[[1.0], [3.0], [5.0]])
    >>> [round(v, 3) for v in standardize(train)[0].fields["x"].flatten().tolist()]
    [-1.225, 0.0, 1.225]
    """
    expect_list(fields, "fields is", f"a list, ('{fields}',)")
    scaled = [train, *others]
    for field in fields:
        scaling = fit_scaling(train, field)
        scaled = [scaling.apply(data) for data in scaled]
    return tuple(scaled)


def missing_features(data: ClientData, field: str = "x") -> tuple[str, ...]:
    """Return names of columns of a floating field (n, F) with NaN, as `fill_missing`'s `indicators`."""
    values = _columns(data, field)
    absent = values.isnan().any(0).tolist()
    return tuple(name for name, missing in zip(_names(data, field), absent, strict=True) if missing)


@spelled
def fill_missing(
    data: ClientData,
    *,
    field: str = "x",
    value: float = 0.0,
    indicators: bool | Sequence[str] = True,
) -> ClientData:
    """Replace NaN, and add a 0/1 column `<feature>_missing` for each column that has any.

    Standardize first, so that the value 0 is the mean. To give training and test rows the same
    columns, name them: `columns = missing_features(train)`, then `fill_missing(test,
    indicators=columns)`.

    Args:
        data: clients with a field (n, F). Columns without names are called `<field>0`, ...
        field: name of the field.
        value: replaces NaN.
        indicators: True for an indicator of each column with any NaN, False for none, or the names
            of the columns that get one.

    Raises:
        KeyError: there is no such field, or no column of a name in `indicators`.
        ValueError: the field is not floating, or not (n, F).

    >>> x = [[1.0, float("nan")], [2.0, 3.0]]
    >>> data = ClientData.from_arrays([0, 0], x=x, features={"x": ["age", "chol"]})
    >>> fill_missing(data).features["x"], fill_missing(data).fields["x"].tolist()
    (('age', 'chol', 'chol_missing'), [[1.0, 0.0, 1.0], [2.0, 3.0, 0.0]])
    """
    values, names = _columns(data, field), _names(data, field)
    chosen = tuple(missing_features(data, field) if indicators is True else indicators or ())
    if unknown := [name for name in chosen if name not in names]:
        what = f"field '{field}' has no column '{unknown[0]}'"
        raise NoSuchName(f"{what}: its columns are {', '.join(names)}")
    absent = values.isnan()[:, [names.index(name) for name in chosen]]
    filled = torch.cat([torch.where(values.isnan(), value, values), absent.to(values.dtype)], dim=1)
    labels = (*names, *(f"{name}_missing" for name in chosen))
    fields, features = {**data.fields, field: filled}, {**data.features, field: labels}
    return replace(data, fields=fields, features=features)


def _field(data: ClientData, field: str) -> Tensor:
    return field_of(expect_client_data(data, "data").fields, field)


def _columns(data: ClientData, field: str) -> Tensor:
    values = _field(data, field)
    if values.dim() != 2 or not values.is_floating_point():
        what = f"field '{field}' is {values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"{what}: it must be floating, of shape (n, F)")
    return values


def _names(data: ClientData, field: str) -> tuple[str, ...]:
    return data.features.get(field) or tuple(
        f"{field}{j}" for j in range(data.fields[field].shape[1])
    )


def read_frame(rows: Any, clients: str, like: ClientData | None = None) -> Any:
    """Return a frame's rows, each column a field, or those that `like` has, coded equally; others as they are."""
    if not is_frame(rows):
        return rows
    read = rows if like is None else rows[[c for c in rows if c in like.fields or c == clients]]
    data = ClientData.from_frame(read, clients, levels=None if like is None else like.levels)
    place = ClientData.from_arrays(rows[clients], place=torch.arange(len(rows))).fields["place"]
    return replace(data, frame_rows=FrameRows(place, rows.index), client_column=clients)
