"""Which rows are behind a node's answers, so that no difference of answers is of a few rows.

A cell has a code of 64 bits, keyed by the node's secret: 32 of the value in single precision, and 32
of the value. So rows are compared over the columns that two answers describe, whatever runs, methods
and precisions they are of. Codes stay in the node's folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from hierfl.core.disk import private_folder, replace_private
from hierfl.data.clients import ClientData
from hierfl.data.row_codes import HALF, Codes, codes_of_values, mixed
from hierfl.nodes.account import ROWS, Ledger, RowSet, broken, digest
from hierfl.nodes.policy import Forbidden

TIMES = 3  # that an answer may count in a difference
LONGEST = 20.0  # seconds of a comparison, after which the answer is refused


@dataclass(frozen=True, eq=False)
class Rows:
    """Codes of the cells of some rows, column -> (n,); `labels` as of a `RowSet`."""

    columns: Mapping[str, Codes]
    labels: Mapping[str, Codes] = field(default_factory=dict)

    @property
    def every(self) -> Mapping[str, Codes]:
        """All columns, of both kinds."""
        return {**self.labels, **self.columns}

    @cached_property
    def row_set(self) -> RowSet:
        """The names under which the codes are kept."""
        of = ({k: digest(v.tobytes()) for k, v in of.items()} for of in (self.columns, self.labels))
        return RowSet(*of)

    def where(self, rows: NDArray[np.bool_]) -> Rows:
        """Return some of the rows."""
        return Rows(
            *({name: v[rows] for name, v in of.items()} for of in (self.columns, self.labels))
        )


def rows_of_frame(
    frame: Any, columns: Sequence[str], key: bytes, labels: Sequence[str] = ()
) -> Rows:
    """Return the codes of columns of a frame; of `labels` too, by which rows are told apart."""
    of = (
        {str(name): codes_of_values(frame[name].to_numpy(), key) for name in n}
        for n in (columns, labels)
    )
    return Rows(*of)


def rows_of_formula(formula: Any, frames: Any, key: bytes) -> Rows:
    """Return the codes of the columns that a formula reads, of the rows of a client that it keeps."""
    from hierfl.formulas.columns import by_client, complete  # pandas

    declared = formula.declared
    ((client, frame),) = by_client(frames, formula.clients).items()
    whole = complete(frame, declared.rows_of, client, declared.missing)
    return rows_of_frame(whole, declared.columns_read, key)


def rows_of_data(data: ClientData, fields: Sequence[str], key: bytes) -> Rows:
    """Return the codes of fields of a client's rows, by the names of their columns where they have names."""
    codes = {}
    for name in fields:
        values = data.fields[name].detach().cpu().numpy()
        if values.ndim == 1:
            levels = data.levels.get(name)
            own = values if levels is None else np.array(levels, dtype=object)[values.astype(int)]
            codes[name] = codes_of_values(own, key)
            continue
        flat, names = values.reshape(len(values), -1), data.features.get(name, ())
        for k in range(flat.shape[1]):
            column = names[k] if len(names) == flat.shape[1] else f"{name}[{k}]"
            codes[column] = codes_of_values(flat[:, k], key)
    return Rows(codes)


# ------------------------------------------------------------ the check
def check_rows(ledger: Ledger, every: Sequence[Rows], least: int) -> tuple[RowSet, ...]:
    """Keep the codes of the rows behind an answer; return those behind no earlier one, for its entry.

    Refuses an answer that, less earlier ones, is of at least one row and fewer than `least`.
    """
    before = [row_set for entry in ledger.entries for row_set in entry.rows]
    new: list[RowSet] = []
    for rows in every:
        if rows.row_set in before:
            continue
        for names in _shared(rows.row_set, before):
            if 0 < _fewest(ledger.folder, rows, before, names, least) < least:
                raise Forbidden(
                    f"fewer than {least} rows have changed since an earlier answer about them, which "
                    f"the difference would reveal: keep the rows, wait until {least} have changed "
                    "(min_count), or give them a budget (epsilon, delta; two_stage with row_noise)"
                )
        before.append(rows.row_set)
        new.append(rows.row_set)
        private_folder(ledger.folder / ROWS)
        for name, column in rows.row_set.every.items():
            if not (path := ledger.folder / ROWS / column).exists():
                replace_private(path, rows.every[name].tobytes())
    return tuple(new)


def _shared(own: RowSet, before: Sequence[RowSet]) -> set[tuple[str, ...]]:
    """Return the columns by which rows can be compared with those behind some earlier answers."""
    return {
        tuple(sorted(own.every.keys() & earlier.every.keys()))
        for earlier in before
        if own.columns.keys() & earlier.columns.keys()
    }


def _fewest(
    folder: Path, rows: Rows, before: Sequence[RowSet], names: tuple[str, ...], least: int
) -> int:
    """Return how few rows a difference of this answer and earlier ones adds or takes away, `least` at most."""
    own = rows.row_set
    sets_before = {
        tuple(earlier.every[name] for name in names)
        for earlier in before
        if own.columns.keys() & earlier.columns.keys() & {*names} and {*names} <= {*earlier.every}
    } - {tuple(own.every[name] for name in names)}
    if not sets_before:
        return least
    sets = [[rows.every[name] for name in names]]
    sets += [[_read(folder, column) for column in of] for of in sorted(sets_before)]
    fewest = least
    for half in (np.uint64(0), HALF):
        counts = _counts([reduce(_joined, (codes >> half for codes in of)) for of in sets])
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


def _read(folder: Path, name: str) -> Codes:
    """Return codes that were kept; what is gone or changed stops the node."""
    try:
        content = (folder / ROWS / name).read_bytes()
    except OSError as error:
        raise broken(f"{ROWS}/{name} cannot be read") from error
    if digest(content) != name:
        raise broken(f"{ROWS}/{name} has changed")
    return np.frombuffer(content, dtype=np.uint64)


def _joined(codes: Codes, others: Codes) -> Codes:
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
    code = reduce(_joined, counts.astype(np.uint64).T)
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
