"""Which rows are behind a node's answers, so that no difference of answers is of a few rows.

A cell has a code of 64 bits, keyed by the node's secret: 32 of the value in single precision, and 32
of the value. So rows are compared over the columns that two answers describe, whatever runs, methods
and precisions they are of. Codes stay in the node's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hierfl.core.disk import private_folder, replace_private
from hierfl.data.clients import ClientData
from hierfl.data.row_differences import Codes, codes_of_values, fewest_between
from hierfl.nodes.account import ROWS, Ledger, RowSet, broken, digest
from hierfl.nodes.policy import Forbidden


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Codes of the cells of some rows, column -> (n,); which of these are `labels` as of a `RowSet`."""

    every: Mapping[str, Codes]
    labels: frozenset[str] = frozenset()

    @cached_property
    def row_set(self) -> RowSet:
        """The names under which the codes are kept."""
        names = {name: digest(codes.tobytes()) for name, codes in self.every.items()}
        labels = {name: names.pop(name) for name in self.labels}
        return RowSet(names, labels)

    def where(self, rows: NDArray[np.bool_]) -> RowCodes:
        """Return some of the rows."""
        return RowCodes({name: codes[rows] for name, codes in self.every.items()}, self.labels)


def rows_of_frame(
    frame: Any, columns: Sequence[str], key: bytes, labels: Sequence[str] = ()
) -> RowCodes:
    """Return the codes of columns of a frame; of `labels` too, by which rows are told apart."""
    names = [str(name) for name in (*labels, *columns)]
    codes = {name: codes_of_values(frame[name].to_numpy(), key) for name in names}
    return RowCodes(codes, frozenset(labels) - {*columns})


def rows_of_formula(
    rows: Any, key: bytes, columns: Sequence[str] | None = None, *, exact: bool = False
) -> RowCodes:
    """Return the codes of the columns that a formula reads, or some, in the `ReadRows` that it keeps.

    Numbers are `exact`, or those of which a schema tells, `coarse` ones for a `least` above 1.
    """
    names = rows.declared.columns_read if columns is None else columns
    return RowCodes({name: rows.codes_kept(name, key, exact=exact) for name in names})


def rows_of_data(data: ClientData, fields: Sequence[str], key: bytes) -> RowCodes:
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
    return RowCodes(codes)


def check_rows(ledger: Ledger, every: Sequence[RowCodes], least: int) -> tuple[RowSet, ...]:
    """Keep the codes of the rows behind an answer; return those behind no earlier one, for its entry.

    Refuses an answer that, less earlier ones, is of at least one row and fewer than `least`.
    """
    before = [row_set for entry in ledger.entries for row_set in entry.rows]
    new: list[RowSet] = []
    for rows in every:
        if (own := rows.row_set) in before:
            continue
        comparable = [of for of in before if own.columns.keys() & of.columns.keys()]
        for names in {tuple(sorted(own.every.keys() & of.every.keys())) for of in comparable}:
            if 0 < _fewest(ledger.folder, rows, before, names, least) < least:
                raise Forbidden(
                    f"fewer than {least} rows have changed since an earlier answer about them, which "
                    f"the difference would reveal: keep the rows, wait until {least} have changed "
                    "(min_count), or give them a budget (epsilon, delta; two_stage with row_noise)"
                )
        before.append(rows.row_set)
        new.append(rows.row_set)
        for name, column in rows.row_set.every.items():
            keep_in(ledger.folder, column, rows.every[name].tobytes())
    return tuple(new)


def _fewest(
    folder: Path, rows: RowCodes, before: Sequence[RowSet], names: tuple[str, ...], least: int
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
    sets += [
        [np.frombuffer(kept_in(folder, column), np.uint64) for column in of]
        for of in sorted(sets_before)
    ]
    return fewest_between(sets, least)


def keep_in(folder: Path, name: str, content: bytes) -> None:
    """Keep what there is of rows, by its digest."""
    private_folder(folder / ROWS)
    if not (path := folder / ROWS / name).exists():
        replace_private(path, content)


def kept_in(folder: Path, name: str) -> bytes:
    """Return what was kept of rows; what is gone or changed stops the node."""
    try:
        content = (folder / ROWS / name).read_bytes()
    except OSError as error:
        raise broken(f"{ROWS}/{name} cannot be read") from error
    if digest(content) != name:
        raise broken(f"{ROWS}/{name} has changed")
    return content
