"""Arrays as users pass them, checked and turned into tensors."""

import numbers
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.consistency import check_dense, check_numbers

Array = Any  # anything torch.as_tensor takes: a tensor, a NumPy array, a list of numbers

_LARGEST = torch.iinfo(torch.int64).max
_FIX = "give numbers, or read strings with ClientData.from_frame, which codes them"


def as_tensor(values: Array, name: str) -> Tensor:
    """Return a tensor of floats in torch's default dtype (NaN for None or NA), int64 or booleans."""
    if isinstance(values, Tensor):
        check_dense(values, name)
        tensor = values.resolve_conj().resolve_neg()
    else:
        tensor = torch.from_numpy(_numbers(values, name))
    check_numbers(tensor, name)
    if tensor.is_floating_point():
        return _in_default_dtype(tensor, name)
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.dtype == torch.uint64:  # of which torch compares none
        check_range(tensor.tolist(), name)
    return tensor.long()


def check_range(values: Iterable[Any], name: str) -> None:
    """Refuse integers that int64 does not hold."""
    largest = max(values, key=lambda v: abs(int(v)), default=0)
    if abs(int(largest)) > _LARGEST:
        raise _too_large(largest, name)


def _numbers(values: Array, name: str) -> NDArray[Any]:
    _check_unmasked(values, name)
    try:
        # Arrays are copied: those that pandas hands out are read-only, which torch warns of.
        array = np.array(values)
    except (TypeError, ValueError, RuntimeError) as error:
        what = "its entries do not form an array; give every row the same shape"
        raise TypeError(f"field '{name}' is not numeric: {what}") from error
    kind = array.dtype.kind
    if kind in "USMmV":
        raise TypeError(f"field '{name}' is not numeric, but {array.dtype}: {_FIX}")
    if kind == "f" and not isinstance(values, np.ndarray) and bool((abs(array) >= 2.0**63).any()):
        # NumPy turns a list of integers into floats where one of them exceeds int64.
        array = np.array(values, object)
    if array.dtype.kind == "O":
        return _of_objects(array, name)
    if kind in "iu":
        check_range([array.max(initial=0)], name)
        return array.astype(np.int64)
    is_long = array.dtype.itemsize > 8 and kind == "f"  # torch has no longer floats
    floats = array.astype(np.float64 if is_long else array.dtype.newbyteorder("="), copy=False)
    if is_long and bool((lost := np.isinf(floats) & np.isfinite(array)).any()):
        raise _too_large(array[lost].flat[0], name)
    return floats


def _check_unmasked(values: Array, name: str) -> None:
    """Refuse masked values: NumPy would return the numbers beneath the mask."""
    arrays = values if isinstance(values, list | tuple) else [values]
    if not any(issubclass(kind, np.ma.MaskedArray) for kind in {*map(type, arrays)}):
        return
    is_masked = (isinstance(v, np.ma.MaskedArray) and v.dtype.kind != "V" for v in arrays)
    masked = sum(masked_in(v) for v, at in zip(arrays, is_masked, strict=True) if at)
    if masked:
        fix = "fill them; .filled(float('nan')) marks floating values as missing"
        raise ValueError(f"field '{name}' has {masked} masked values: {fix}")


def masked_in(values: Any) -> int:
    """Return how many values are masked."""
    return int(np.ma.getmaskarray(values).sum()) if isinstance(values, np.ma.MaskedArray) else 0


def _of_objects(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return the numbers of an array of Python objects; None and NA become NaN."""
    import pandas as pd  # slow to import

    missing = np.asarray(pd.isna(array))
    present = array[~missing].tolist()
    for value in present:
        if not isinstance(value, numbers.Real | Decimal | np.bool_):
            what = f"is not numeric: it holds {str(value)[:40]!r}"
            raise TypeError(f"field '{name}' {what}; {_FIX}")
    if missing.any() or not all(isinstance(v, numbers.Integral | np.bool_) for v in present):
        try:
            return np.where(missing, np.nan, array).astype(np.float64)
        except OverflowError as error:
            raise _too_large("an integer", name) from error
    if all(isinstance(v, bool | np.bool_) for v in present):
        return array.astype(bool)
    check_range(present, name)
    return array.astype(np.int64)


def _too_large(value: object, name: str) -> ValueError:
    what = f"field '{name}' holds {value}, beyond the range of int64 and float64"
    return ValueError(f"{what}: code it as smaller numbers")


def _in_default_dtype(tensor: Tensor, name: str) -> Tensor:
    """Return floats in torch's default dtype, once nothing that tells rows apart is lost."""
    dtype = torch.get_default_dtype()
    floats = tensor.to(dtype)
    if tensor.dtype != torch.float64 or dtype == torch.float64:
        return floats
    word, lost = str(dtype).removeprefix("torch."), floats.isinf() & tensor.isfinite()
    if bool(lost.any()):
        fix = "scale it first, or call torch.set_default_dtype(torch.float64)"
        what = f"holds {tensor[lost][0].item():g}, beyond the range of {word}"
        raise ValueError(f"field '{name}' {what}: {fix}")
    if tensor.dim() <= 2 and len(tensor) > 1:
        _check_rounding(tensor.unsqueeze(-1) if tensor.dim() == 1 else tensor, name, dtype)
    return floats


def _check_rounding(wide: Tensor, name: str, dtype: torch.dtype) -> None:
    """Refuse columns (n, F) whose rows differ by less than about a hundred roundings to `dtype`."""
    low, high = wide.aminmax(dim=0)
    largest = torch.maximum(low.abs(), high.abs())
    narrow = high - low < 1e3 * torch.finfo(dtype).eps * largest
    for j in (narrow | low.isnan()).nonzero()[:, 0].tolist():  # NaN hides a column's range
        column = wide[:, j]
        column = column[column.isfinite()]
        if len(column) < 2:
            continue
        sd, mean = column.std().item(), column.mean().item()
        rounding = (column - column.to(dtype)).square().mean().sqrt().item()
        if rounding > 0.01 * sd > 0.08 * torch.finfo(torch.float64).eps * abs(mean):
            which = f"column {j} of field '{name}'" if wide.shape[1] > 1 else f"field '{name}'"
            what = f"varies by {sd:.3g} about {mean:.9g}, which {str(dtype).removeprefix('torch.')}"
            fix = "subtract its mean first, or call torch.set_default_dtype(torch.float64)"
            raise ValueError(f"{which} {what} rounds away: {fix}")
