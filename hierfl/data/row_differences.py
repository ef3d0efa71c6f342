"""How few rows some whole-number combination of sets of rows is of."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

Codes = NDArray[np.uint64]
HALF = np.uint64(32)  # bits of a code that are of the value in single precision


def codes_of_values(values: NDArray[Any], key: bytes) -> Codes:
    """Return keyed codes of values, equal for equal numbers and texts whatever their dtypes."""
    if values.dtype.kind in "biuf":
        return _codes_of_numbers(values.astype(np.float64), key)
    import pandas as pd  # frames alone have such columns

    places, kinds = pd.factorize(values, use_na_sentinel=False)
    numbers = pd.to_numeric(pd.Series(kinds, dtype=object), errors="coerce").to_numpy(np.float64)
    texts = pd.util.hash_array(np.array(list(map(str, kinds)), dtype=object), categorize=False)
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


TIMES = 3  # that a set may count in a combination
LONGEST = 20.0  # seconds of a search, after which 1 is returned


def fewest_between(sets: Sequence[Sequence[Codes]], least: int) -> int:
    """Return how few rows the first set adds to some combination of the others, or takes away, `least` at most.

    A set has the codes of its rows by column, the same columns as the others. 0 and more than `least` are `least`.
    """
    fewest = least
    for half in (np.uint64(0), HALF):
        counts = _counts([reduce(joined, (codes >> half for codes in of)) for of in sets])
        if len(counts) == 1:  # the number of rows, which is no secret
            return least
        new, old = counts[:, 0], counts[:, 1:]
        for times in range(1, TIMES + 1):
            apart = new[:, None] - times * old
            sums = np.maximum(apart.clip(min=0).sum(0), -apart.clip(max=0).sum(0))
            fewest = min([fewest, *sums[sums > 0].tolist()])
        if len(sets) > 2:
            fewest = min(fewest, _fewest_combined(*_patterns(counts, least), least))
    return fewest


def joined(codes: Codes, others: Codes) -> Codes:
    """Return codes of pairs of codes; the order counts."""
    return mixed(codes * np.uint64(3) + others, bytes(8))


def _counts(sets: Sequence[Codes]) -> NDArray[np.int64]:
    """Return how often each row is in each of some sets of rows, (V, K)."""
    values, place = np.unique(np.concatenate(sets), return_inverse=True)
    ends = np.cumsum([len(of) for of in sets])[:-1]
    of_set = [np.bincount(at, minlength=len(values)) for at in np.split(place, ends)]
    return np.stack(of_set, axis=1).astype(np.int64)


def _patterns(counts: NDArray[np.int64], least: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return in which sets rows are, (P, K), and how many rows are so, (P,).

    Rows that are equal to `least` or more others of a set cannot be told from them: as few of them as
    possible are taken for other rows.
    """
    code = reduce(joined, counts.astype(np.uint64).T)
    _, first, times = np.unique(code, return_index=True, return_counts=True)
    patterns: Counter[tuple[int, ...]] = Counter()
    for count, weight in zip(counts[first], times.tolist(), strict=True):
        if count.max() < least:
            common = int(np.gcd.reduce(count))
            patterns[tuple((count // common).tolist())] += common * weight
            continue
        upto = 0
        for level in np.unique(count[count > 0]).tolist():
            patterns[tuple((count >= level).astype(int).tolist())] += (level - upto) * weight
            upto = level
    return np.array(list(patterns)), np.array(list(patterns.values()))


def _fewest_combined(patterns: NDArray[Any], weights: NDArray[Any], least: int) -> int:
    """Return how few rows a whole-number combination of sets of rows adds or takes away, with the first set in it.

    0: the first set is a combination of the others, and tells nothing new. `least`: so many or more.
    """
    is_light = weights < least
    light, times, size = patterns[is_light], weights[is_light], patterns.shape[1]
    count = len(light)
    # counts of the sets, rows added and taken away by pattern, and the larger of their numbers
    never = np.hstack([patterns[~is_light], np.zeros((sum(~is_light), 2 * count + 1))])
    split = np.hstack([light, -np.eye(count), np.eye(count), np.zeros((count, 1))])
    zero = np.zeros(size), np.zeros(count)
    larger = np.array([np.r_[zero[0], times, zero[1], -1.0], np.r_[zero[0], zero[1], times, -1.0]])
    solved = milp(
        np.r_[np.zeros(size + 2 * count), 1.0],
        integrality=np.r_[np.ones(size), np.zeros(2 * count + 1)],
        bounds=Bounds(
            np.r_[1.0, np.full(size - 1, -TIMES), np.zeros(2 * count + 1)],
            np.r_[np.full(size, TIMES), np.full(2 * count + 1, np.inf)],
        ),
        constraints=[
            LinearConstraint(np.vstack([never, split]), 0.0, 0.0),
            LinearConstraint(larger, -np.inf, 0.0),
        ],
        options={"time_limit": LONGEST},
    )
    if solved.status == 2:  # whatever is taken, `least` rows or more remain
        return least
    return min(round(solved.fun), least) if solved.status == 0 else 1
