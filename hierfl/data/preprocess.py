"""Scaling and filling of fields, from what each client can add up alone.

A client tells the server, per feature, how many values it has, their mean and their sum of squares about it: three numbers
that add up over clients (Chan, Golub and LeVeque 1983), whatever the order. No row leaves a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hierfl.data.clients import ClientData


@dataclass(frozen=True, eq=False)
class Moments:
    """What clients say of a field: K clients' statistics, or one for all of them.

    Args:
        count: (K, ...) float64, values that are not NaN, per feature.
        mean: (K, ...) float64, their mean; 0 where there are none.
        square: (K, ...) float64, their sum of squares about the mean.
    """

    count: Tensor
    mean: Tensor
    square: Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """An affine map of one field, `(x - mean) / sd`, per feature.

    Args:
        field: its name.
        mean: (...) of a row's shape.
        sd: (...) of a row's shape, > 0; 1 where the training rows are all alike.
    """

    field: str
    mean: Tensor
    sd: Tensor

    def apply(self, data: ClientData) -> ClientData:
        """Scale the field; NaN stays NaN.

        Raises:
            ValueError: rows of another shape.
        """
        values = _field(data, self.field)
        if values.shape[1:] != self.mean.shape:
            raise ValueError(
                f"a row of '{self.field}' has shape {tuple(values.shape[1:])}, scaling's {tuple(self.mean.shape)}"
            )
        # In float64: of values far from 0 the difference is what counts.
        return data.with_fields(
            **{self.field: (values.double() - self.mean.double()) / self.sd.double()}
        )


def client_moments(data: ClientData, field: str = "x") -> Moments:
    """Count, mean and sum of squares of each feature on each client: what a client sends.

    Raises:
        KeyError: no such field.
        ValueError: an infinite value, with the client that has it.
    """
    values = _field(data, field).double()
    infinite = values.isinf().reshape(len(values), -1).any(1).nonzero()
    if len(infinite):
        name = data.names[int(data.row_client[int(infinite[0])])]
        raise ValueError(
            f"field '{field}' of client '{name}' has an infinite value: mend it, or make it NaN if it is missing"
        )
    seen = ~values.isnan()
    zeros = torch.zeros(data.num_clients, *values.shape[1:], dtype=torch.float64)
    count = zeros.index_add(0, data.row_client, seen.double())
    # Two passes: a sum of raw squares would cancel for values far from 0.
    mean = zeros.index_add(0, data.row_client, values.nan_to_num(0.0)) / count.clamp(min=1.0)
    deviation = torch.where(seen, values - mean[data.row_client], 0.0)
    mean = mean + zeros.index_add(0, data.row_client, deviation) / count.clamp(min=1.0)
    deviation = torch.where(seen, values - mean[data.row_client], 0.0)
    return Moments(count, mean, zeros.index_add(0, data.row_client, deviation**2))


def merged(moments: Moments) -> Moments:
    """Add clients' moments (K, ...) up: those of all rows together, (...)."""
    count = moments.count.sum(0)
    mean = (moments.count * moments.mean).sum(0) / count.clamp(min=1.0)
    between = (moments.count * (moments.mean - mean) ** 2).sum(0)
    return Moments(count, mean, moments.square.sum(0) + between)


def fit_scaling(train: ClientData, field: str = "x") -> Scaling:
    """Mean and standard deviation (the population's) of each feature over all rows of `train`.

    A feature that is constant up to rounding keeps sd 1; one that is never seen keeps mean 0 and sd 1.

    Raises:
        KeyError, ValueError: as `client_moments`.
    """
    total = merged(client_moments(train, field))
    sd = (total.square / total.count.clamp(min=1.0)).sqrt()
    values = _field(train, field)
    precision = (
        torch.finfo(values.dtype).eps
        if values.is_floating_point()
        else torch.finfo(torch.float64).eps
    )
    constant = sd <= 8.0 * precision * total.mean.abs()
    dtype = torch.get_default_dtype()
    return Scaling(field, total.mean.to(dtype), torch.where(constant, 1.0, sd).to(dtype))


def standardise(
    train: ClientData, *others: ClientData, fields: Sequence[str] = ("x",)
) -> tuple[ClientData, ...]:
    """Scale fields to mean 0 and sd 1 over the rows of `train`, and those of `others` (test rows, new clients) alike.

    To keep the scaling for data that come later, use `fit_scaling` and `Scaling.apply`.

    Raises:
        KeyError, ValueError: as `client_moments` and `Scaling.apply`.

    >>> train = ClientData.from_arrays([0, 0, 1], x=[[1.0], [3.0], [5.0]])
    >>> [round(v, 3) for v in standardise(train)[0].fields["x"].flatten().tolist()]
    [-1.225, 0.0, 1.225]
    """
    scaled = [train, *others]
    for field in fields:
        scaling = fit_scaling(train, field)
        scaled = [scaling.apply(data) for data in scaled]
    return tuple(scaled)


def missing_features(data: ClientData, field: str = "x") -> tuple[str, ...]:
    """Names of the columns of a field (n, D) that have any NaN: what `fill_missing` needs to treat other data alike.

    Raises:
        KeyError: no such field.
        ValueError: a field that is not (n, D).
    """
    values = _columns(data, field)
    absent = values.isnan().any(0).tolist()
    return tuple(name for name, missing in zip(_names(data, field), absent, strict=True) if missing)


def fill_missing(
    data: ClientData,
    *,
    field: str = "x",
    value: float = 0.0,
    indicators: bool | Sequence[str] = True,
) -> ClientData:
    """Fill NaN, and say where it was: a 0/1 column `<feature>_missing` for each column that has any.

    Standardise first: then the value 0 is the mean. Data that are to have the same columns (train and test rows) must be
    told which: `columns = missing_features(train)`, then `fill_missing(test, indicators=columns)`.

    Args:
        data: with a field (n, D); columns without names are called `<field>0`, `<field>1`, ...
        field: its name.
        value: what replaces NaN.
        indicators: True: for each column with any NaN; False: none; or the names of the columns that get one.

    Returns:
        The same clients, the field (n, D + indicators), with its features' names.

    Raises:
        KeyError: no such field, or an indicator for a column that there is not.
        ValueError: a field that is not (n, D).

    >>> data = ClientData.from_arrays([0, 0], x=[[1.0, float("nan")], [2.0, 3.0]], features={"x": ["age", "chol"]})
    >>> fill_missing(data).features["x"], fill_missing(data).fields["x"].tolist()
    (('age', 'chol', 'chol_missing'), [[1.0, 0.0, 1.0], [2.0, 3.0, 0.0]])
    """
    values, names = _columns(data, field), _names(data, field)
    wanted = tuple(missing_features(data, field) if indicators is True else indicators or ())
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise KeyError(f"field '{field}' has no column '{unknown[0]}'; it has {', '.join(names)}")
    absent = values.isnan()[:, [names.index(name) for name in wanted]]
    filled = torch.cat([torch.where(values.isnan(), value, values), absent.to(values.dtype)], dim=1)
    labels = (*names, *(f"{name}_missing" for name in wanted))
    return replace(
        data, fields={**data.fields, field: filled}, features={**data.features, field: labels}
    )


def _field(data: ClientData, field: str) -> Tensor:
    if field not in data.fields:
        raise KeyError(f"there is no field '{field}'; there are {sorted(data.fields)}")
    return data.fields[field]


def _columns(data: ClientData, field: str) -> Tensor:
    values = _field(data, field)
    if values.dim() != 2 or not values.is_floating_point():
        raise ValueError(
            f"field '{field}' is {values.dtype} of shape {tuple(values.shape)}; floating columns (n, D) are needed"
        )
    return values


def _names(data: ClientData, field: str) -> tuple[str, ...]:
    return data.features.get(field) or tuple(
        f"{field}{j}" for j in range(data.fields[field].shape[1])
    )
