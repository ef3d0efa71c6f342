"""A client's own rows, as its node fits them: what their sums and products may tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hierfl.data.row_differences import Codes, joined
from hierfl.formulas.answers import argument_of, group_names
from hierfl.formulas.columns import (
    CENSORED,
    column_fault,
    holds_numbers,
    named,
    number_column,
    numbers,
    prepared,
)
from hierfl.formulas.design import every_design_of
from hierfl.formulas.disclosure import (
    EXACT,
    NEARLY,
    SHARE,
    Floats,
    coarse,
    isolated,
    outcomes_of,
    singled_out,
    tells_of_few,
)
from hierfl.formulas.imputed import filled, known_values
from hierfl.formulas.layout import Layout
from hierfl.formulas.read_rows import ReadRows, scattered
from hierfl.formulas.schema import OFFSET, STATEFUL, Implausible
from hierfl.formulas.signatures import arguments

FEW = (
    "{} singles out fewer than {} rows of this client: leave its term out, merge its levels, have a "
    "column of its logarithm, or let the node's owner lower min_count"
)


class FittedRows(NamedTuple):
    """A client's rows as its node fits them, {client: frame}, and the columns of which some values are `moved`."""

    frames: Mapping[str, pd.DataFrame]
    moved: tuple[str, ...]


def fitted_rows(formula: Any, frames: Any) -> FittedRows:
    """Return the rows of a node's one client as it fits them; `formula` is a `Formula` with the schema."""
    rows = ReadRows.of(formula, frames, formula.agreed.min_count)
    made = {name: numbers(rows.frame[name]).copy() for name in rows.moved}
    for name, values in rows.moved.items():
        made[name][rows.there] = values
    return FittedRows({rows.client: rows.frame.assign(**made)}, tuple(sorted(made)))


def told_numbers(rows: ReadRows) -> Floats:
    """Return the columns of numbers of a client's rows, and squares of covariates, (N, p): a schema gives their sums.

    NaN stands where a row has no value, or is not among those that the formula keeps. Few rows may share
    a value of an outcome, so that its own two sums tell of these.
    """
    outcomes, made = outcomes_of(rows.declared), [np.zeros((len(rows.own), 0))]
    for name, (_, values) in rows.numbers.items():
        if (there := np.isfinite(values)).any():
            away = np.where(there, values - values[there].mean(), np.nan)
            made.append(np.where(there, values, np.nan)[:, None])
            made += (
                [] if name in outcomes else [(away / (values[there].std() or 1.0))[:, None] ** 2]
            )
    return rows.on_every_row(np.hstack(made))


def described_numbers(
    frame: pd.DataFrame, described: Iterable[tuple[str, Any]], client: str, least: int
) -> Floats:
    """Return the columns of numbers of some rows each, (N, p), of which a table has the means.

    Beside them stands which rows they are of, whose number is known too, but where it is of few rows.
    """
    of_numbers = ((frame[n], n, rows) for n, rows in described)
    of = [
        (numbers(c)[rows], rows) for c, n, rows in of_numbers if holds_numbers(c, None, n, client)
    ]
    columns = [scattered(coarse(values, least)[:, None], rows) for values, rows in of]
    masks = [*{rows.tobytes(): rows[:, None] * 1.0 for _, rows in of}.values()]
    while masks and len(isolated(np.hstack(masks), least, EXACT)):
        masks.pop()
    return np.hstack([np.zeros((len(frame), 0)), *columns, *masks])


def told_columns(rows: ReadRows, question: Any) -> Floats:
    """Return the columns of a client's rows, (N, p), of which an answer has the sums."""
    declared, schema, client = rows.declared, question.schema, rows.client
    if question.kind == "call":
        call = declared.transform(question.text)
        values = argument_of(call, schema, rows.told, client)
        has_powers = STATEFUL[call.callee].needs == "powers"
        degree = int(arguments(call)["degree"]) if has_powers else 1
        scaled = (values - values.mean()) / (values.std() or 1.0)
        columns = [*(scaled[:, None] ** np.arange(1, 2 * degree + 1)).T]
    else:
        told = rows.told_design(schema)
        columns = [*told.columns.exact.values()]
        columns += [] if told.response is None else [told.response]
    known = [values[:, None] for values in columns if np.isfinite(values).any()]
    return rows.on_every_row(np.hstack([np.zeros((len(rows.own), 0)), *known]))


def kept_columns(rows: ReadRows, columns: Floats, key: bytes) -> tuple[tuple[str, ...], bytes]:
    """Return what columns, (N, p), were made of, by name; and its codes, by which rows are sorted, and the columns.

    Means stand where a row is not counted: how many are is known.
    """
    declared = rows.declared
    names = tuple(sorted({*declared.rows_of, *declared.columns_read} & {*rows.frame}))
    order, codes = _in_order(rows, names, key)
    whole = np.where(np.isnan(columns), np.nanmean(columns, 0), columns)
    return names, codes + whole[order].T.tobytes()


def _in_order(rows: ReadRows, names: Iterable[str], key: bytes) -> tuple[Any, bytes]:
    """Return an order of rows, (n,), that only some columns determine; n, and the codes of these in it."""
    codes = reduce(joined, (rows.codes(name, key) for name in names))
    order = np.argsort(codes, kind="stable")
    return order, len(order).to_bytes(8, "little") + codes[order].tobytes()


def _read(content: bytes) -> tuple[Codes, Floats]:
    """Return a code of each row, of equal ones too, (n,), and columns, (n, p); `content` is as of `kept_columns`."""
    count = int.from_bytes(content[:8], "little")
    codes = np.frombuffer(content, np.uint64, count, 8)
    times = np.arange(count) - np.searchsorted(codes, codes)  # that a code came before
    columns = np.frombuffer(content, offset=8 * (count + 1)).reshape(-1, count).T
    return joined(codes, times.astype(np.uint64)), columns


def check_together(
    told: Iterable[tuple[Sequence[str], bytes, bool]], own_rows: ReadRows, key: bytes
) -> None:
    """Refuse columns that with others that were `told` of the rows tell of few of these (`Implausible`).

    Those are `kept_columns`, the new ones first, and whether they are of a design: of as many columns of
    designs as there are rows, any are told of. A frame may have other rows than before, in another order.
    """
    every, rows, least = list[tuple[Any, Floats, bool]](), len(own_rows.frame), own_rows.least
    orders: dict[Any, tuple[Any, Codes]] = {}
    for names, content, is_design in told:
        if not {*names} <= {*own_rows.frame}:
            continue  # of rows that had other columns
        if (read := (*names,)) not in orders:  # most are of the same columns
            order, now = _in_order(own_rows, names, key)
            orders[read] = order, _read(now)[0]
        (order, own_codes), (codes, columns) = orders[read], _read(content)
        own, there = np.intersect1d(own_codes, codes, return_indices=True)[1:]
        if len(own):
            at = np.arange(rows, rows + len(codes))
            at[there] = order[own]
            gone = at >= rows
            at[gone] = np.arange(rows, rows := rows + int(gone.sum()))
            every.append((at, columns, is_design))
    made = [np.tile(columns.mean(0), (rows, 1)) for _, columns, _ in every]
    for whole, (at, columns, _) in zip(made, every, strict=True):
        whole[at] = columns
    of_designs = [whole for whole, (*_, is_design) in zip(made, every, strict=True) if is_design]
    tells = len(of_designs) > 1 and tells_of_few(np.hstack(of_designs), least)
    apart = {of.tobytes(): of for of in np.hstack(made).T}  # most were told of before
    if tells or len(isolated(np.stack([*apart.values()], axis=1), least, EXACT)):
        if len(every) == 1:
            raise Implausible(FEW.format("a combination of its columns", least))
        raise Implausible(
            f"with earlier answers about these rows, its columns would tell of fewer than {least} of "
            f"them: leave terms out, or wait until {least} rows have changed (min_count)"
        )


class Disclosed(NamedTuple):
    """What a fit sends sums and products of, by name, (n,), on a client's rows.

    `read` are values of columns, `columns` those of the design, of responses that are numbers and of
    weights, `beside` a response's levels, the pieces of its likelihood, and what stands beside it;
    `rows_known` is as of `known_values`, and `labels` names the responses.
    """

    read: Mapping[str, Floats]
    columns: Mapping[str, Floats]
    beside: Mapping[str, Floats]
    rows_known: Mapping[str, Any]
    labels: frozenset[str]

    @property
    def whole(self) -> dict[str, Floats]:
        """Those of all rows."""
        made = {**self.columns, **self.beside}
        for name in self.rows_known:
            made.pop(name, None)
        return made

    @property
    def amounts(self) -> dict[str, Floats]:
        """Those of more than two values, without responses that are counts."""
        return {
            name: values
            for name, values in self.whole.items()
            if not (_is_two_valued(values) or (name in self.labels and not (values % 1.0).any()))
        }

    @property
    def matrix(self) -> Floats:
        """All of them that have a value in each row, (n, p)."""
        return np.stack([*self.columns.values(), *self.beside.values()], axis=1)


def disclosed_of(formula: Any, frame: pd.DataFrame, client: str) -> Disclosed:
    """Return what a fit tells of a client's rows as it fits them; `formula` is a `Formula` with the schema."""
    declared, schema = formula.declared, formula.agreed
    frame = ReadRows(declared, frame, client, schema.min_count).own
    ready = prepared(frame, schema.columns, client)
    additions = declared.parts.additions
    if end := additions.get("upper"):  # which is read of intervals alone
        kinds = named(frame[additions["cens"]], additions["cens"], client)
        is_interval = np.isin(kinds, ("interval", str(CENSORED["interval"])))
        ready[end] = np.where(is_interval, number_column(frame[end], end, client), 0.0)
    numbers_of = [name for name, column in schema.columns.items() if column.kind == "number"]
    # what the schema has told of these is of other values where they set rows apart
    read = {name: ready[name][ready[name].notna()].to_numpy(np.float64) for name in numbers_of}
    rows_known: dict[str, Any] = {}
    if declared.imputed:
        ready, gone = filled(declared.imputed, ready)
        rows_known = known_values(every_design_of(declared, schema), ready, gone, client)
    columns: dict[str, Any] = {}
    for layout in formula.layouts:
        matrix, offset = layout.common.evaluate(ready, client)
        columns |= dict(zip(layout.common.columns, matrix.T, strict=True))
        columns |= {OFFSET: offset} if layout.common.offsets else {}
        for part, label, values in _of_bars(layout, frame, ready, client):
            columns[label] = values
            rows_known |= {label: rows_known[part]} if part in rows_known else {}
    for label in (*declared.parts.labels, *filter(None, [additions.get("weights")])):
        if schema.columns[label].kind == "number":
            columns[label] = ready[label].to_numpy(np.float64)
    names_of = [label for label in declared.parts.labels if schema.columns[label].kind != "number"]
    codes = {*names_of, additions.get("cens"), additions.get("event")}
    added = {name: _added(ready[name], name in codes) for name in (*names_of, *additions.values())}
    beside = dict(chain.from_iterable(added.values()))
    for label in declared.parts.labels if declared.family.edges else ():
        piece = np.searchsorted(declared.family.edges, ready[label], side="right")
        beside |= dict(_added(pd.Series(piece, name=f"{label} by piece"), True))
    return Disclosed(read, columns, beside, rows_known, frozenset(declared.parts.labels))


def check_design(
    formula: Any, frame: pd.DataFrame, client: str, least: int, least_joint: int = 1
) -> Disclosed:
    """Refuse a design whose columns, some combination of them or some of its groups are of a few rows (`Implausible`).

    X'X and X'y of a column that is the same in all but a few rows have those rows' values of all others:
    DataSHIELD's rule for `ds.glm`. So have those of x and of x + 1000 (age > 96), by their difference, and
    the sum of a dose in the rows of a level, where all but one have none, and the product of two numbers
    that few rows have both of.
    Two columns of two values are refused where fewer than `least_joint` rows have a pair of these.
    Returns what the fit tells of otherwise.
    """
    disclosed = disclosed_of(formula, frame, client)
    rows_known, labels = disclosed.rows_known, formula.declared.parts.labels
    made = {n: of[rows_known[n]] if n in rows_known else of for n, of in disclosed.columns.items()}
    as_it_is = {*labels, *disclosed.beside}
    for share, every in ((SHARE, disclosed.read), (NEARLY, {**made, **disclosed.beside})):
        for name, values in every.items():
            if len(singled_out(values, least, by_value=name not in as_it_is, share=share)):
                raise Implausible(FEW.format(f"the column '{name}'", least))
    for name, known in rows_known.items():  # the others' sums are of rows that have a value, too
        if 0 < np.size(known) - np.count_nonzero(known) < least:
            raise Implausible(FEW.format(f"what '{name}' lacks", least))
    whole, amounts = disclosed.whole, disclosed.amounts
    if whole and len(isolated(np.stack([*whole.values()], axis=1), least, EXACT)):
        raise Implausible(FEW.format("a combination of its columns", least))
    is_high = {name: of == of.max() for name, of in whole.items() if _is_two_valued(of)}
    for name, rows in is_high.items():
        if any(_tells_in(amounts, of, least) for of in (rows, ~rows)):
            raise Implausible(FEW.format(f"a number beside one value of '{name}'", least))
    _check_products(amounts, least)
    _check_pairs(is_high, least_joint)
    return disclosed


def _check_products(amounts: Mapping[str, Floats], least: int) -> None:
    """Refuse two numbers where few rows have neither's most common value: X'X has their sum of products."""
    least = min([least, *(len(values) // 4 + 1 for values in amounts.values())])
    away: dict[str, Any] = {}
    for name, values in amounts.items():
        distinct, counts = np.unique(values, return_counts=True)
        if counts.max() >= least:
            away[name] = values != distinct[counts.argmax()]
    for (name, rows), (other, others) in combinations(away.items(), 2):
        if 0 < np.count_nonzero(rows & others) < least:
            raise Implausible(FEW.format(f"the product of '{name}' and '{other}'", least))


def _is_two_valued(values: Floats) -> bool:
    low, high = values.min(), values.max()
    return bool(low < high and ((values == low) | (values == high)).all())


def _tells_in(amounts: Mapping[str, Floats], rows: Any, least: int) -> bool:
    """Return whether the sum of an amount over some rows is of few: a few of a handful have most squares."""
    for values in amounts.values():
        own = values[rows]
        least = min(least, len(own) // 4 + 1)
        squares = (own - own.mean()) ** 2
        is_uneven = squares.max() > squares.sum() / (2 * least)  # else no row is isolated
        if is_uneven and len(isolated(own[:, None], least, EXACT)):
            return True
    return False


def _of_bars(
    layout: Layout, frame: pd.DataFrame, ready: pd.DataFrame, client: str
) -> Iterator[tuple[str, str, Floats]]:
    """Yield the columns of terms with a bar, by their names and labels; of crossed terms those of each group."""
    for term in layout.groups:
        names = np.full(len(frame), "")
        if term.place == "crossed":
            names = group_names(frame, term.group.by, client)
        if others := {*names.tolist()} - {"", *term.levels}:
            what, public = f"has the group {min(others)}", "has a group that is not an agreed one"
            raise column_fault(what, public, ":".join(term.group.by), client)
        matrix = term.evaluate(ready, client)
        for name in np.unique(names).tolist():
            suffix = f" '{name}'" if name else ""
            for part, values in zip(term.columns, matrix.T, strict=True):
                yield part, f"{part} of {term.site}{suffix}", (names == name) * values


def groups_of_few(formula: Any, frames: Any, least: int) -> str:
    """Return why a client may not send the sums of each of its own groups; "": enough rows are of each.

    In a group, no combination of its columns, and no amount of the design, may be of fewer than `least`
    rows either.
    """
    terms = [term for layout in formula.layouts for term in layout.at("within")]
    if not terms or formula.agreed.min_count < 2:  # a schema may name levels of single rows
        return ""
    rows = ReadRows.of(formula, frames, least)
    ready = prepared(rows.own, formula.agreed.columns, rows.client)
    if formula.declared.imputed:
        ready, _ = filled(formula.declared.imputed, ready)
    amounts = disclosed_of(formula, rows.frame, rows.client).amounts
    for term in terms:
        by = tuple(name for name in term.group.by if name != formula.clients)
        names, matrix = group_names(rows.own, by, rows.client), term.evaluate(ready, rows.client)
        _, codes = np.unique(names, return_inverse=True)
        ends = np.bincount(codes).cumsum()[:-1]
        for at in np.split(np.argsort(codes, kind="stable"), ends):
            own, differs = matrix[at], np.ptp(matrix[at], axis=0).any()
            few = len(own) < least or (differs and len(isolated(own, least, EXACT)))
            if few or _tells_in(amounts, at, least):
                return (
                    f"the method sends sums of each group of '{term.group.name}', and fewer than {least} "
                    "rows determine some (min_count): fit with disclose='sums', merge groups, or let the "
                    "node's owner lower min_count"
                )
    return ""


def _check_pairs(is_high: Mapping[str, Any], least: int) -> None:
    """Refuse two columns of two values that fewer than `least` rows have together: X'X and X'y count them."""
    for (name, first), (other, second) in combinations(is_high.items(), 2) if least > 1 else ():
        counts = np.bincount(2 * first + second)
        if counts[counts > 0].min() < least:
            raise Implausible(
                f"fewer than {least} rows of this client have a pair of values of '{name}' and '{other}': "
                "leave one out, or let the node's owner lower min_joint_count"
            )


def _added(column: pd.Series[Any], are_codes: bool) -> Iterator[tuple[str, Any]]:
    """Yield what stands beside numbers, (n,), by level: X'y of an event that few rows have is of their covariates."""
    if not hasattr(column, "cat") and not are_codes:
        yield str(column.name), np.nan_to_num(column.to_numpy(np.float64))
        return
    for level in column.cat.categories if hasattr(column, "cat") else np.unique(column):
        yield f"{column.name}[{level}]", (column == level).to_numpy(np.float64)
