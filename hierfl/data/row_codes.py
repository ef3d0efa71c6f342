"""Keyed codes of values, of 64 bits: 32 of the value in single precision, and 32 of the value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint64]
HALF = np.uint64(32)  # bits of a code that are of the value in single precision


def codes_of_values(values: NDArray[Any], key: bytes) -> Codes:
    """Return keyed codes of values, equal for equal numbers and texts whatever their dtypes."""
    if values.dtype.kind in "biuf":
        return _codes_of_numbers(values.astype(np.float64), key)
    import pandas as pd  # frames alone have such columns

    places, kinds = pd.factorize(values, use_na_sentinel=False)
    numbers = pd.to_numeric(pd.Series(kinds, dtype=object), errors="coerce").to_numpy(np.float64)
    texts = pd.util.hash_array(np.array(list(map(str, kinds)), dtype=object))
    is_text = np.isnan(numbers) & ~np.asarray(pd.isna(kinds))
    codes: Codes = np.where(is_text, mixed(texts, key), _codes_of_numbers(numbers, key))[places]
    return codes


def _codes_of_numbers(values: NDArray[np.float64], key: bytes) -> Codes:
    whole = np.where(np.isnan(values), np.nan, values + 0.0)  # one NaN, and no -0
    with np.errstate(over="ignore"):
        single = whole.astype(np.float32).astype(np.float64)
    coarse, fine = (mixed(v.view(np.uint64), key) for v in (single, whole))
    return (coarse >> HALF << HALF) | (fine >> HALF)


def mixed(codes: Codes, key: bytes) -> Codes:
    """Return a keyed permutation of 64-bit numbers: SplitMix64's between four secret words."""
    for word in np.frombuffer(key, dtype=np.uint64):
        codes = codes ^ word
        codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        codes = codes ^ (codes >> np.uint64(31))
    return codes
