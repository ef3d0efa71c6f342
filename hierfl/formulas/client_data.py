"""Clients' frames as the `ClientData` that a formula's program reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from hierfl.core.user_warnings import warn
from hierfl.data.clients import ClientData
from hierfl.data.consistency import RowsFault, offsets_of
from hierfl.data.frames import FrameRows
from hierfl.formulas.answers import group_names
from hierfl.formulas.columns import (
    CENSORED,
    by_client,
    check_column,
    column_fault,
    complete,
    ends_of,
    incomplete,
    index_in,
    joined,
    number_column,
    prepared,
)
from hierfl.formulas.declaration import Declaration
from hierfl.formulas.expressions import columns_of
from hierfl.formulas.imputed import fields_of, filled, with_known
from hierfl.formulas.layout import GroupTerm, Layout, rows_of_above
from hierfl.formulas.levels import warn_of_far_origins, warn_of_far_values
from hierfl.formulas.transforms import BeyondKnots

Fields = dict[str, NDArray[Any]]
# (client, grouping) -> the names of its groups, in the order of their indices; they stay there
Inside = dict[tuple[str, str], tuple[str, ...]]


def client_data(
    formula: Any, frames: Any, inside: Inside, *, labeled: bool, asked: bool = False
) -> ClientData:
    """Return clients' rows as the program reads them, `asked` ones perhaps unlabeled; add their groups to `inside`."""
    declared = formula.declared
    by_name, index = _placed(frames, declared.clients)
    has_label: dict[str, NDArray[np.bool_]] = {}
    if labeled and asked and declared.missing == "drop":
        by_name, has_label = _with_labels(declared, by_name)
        labeled = any(of.any() for of in has_label.values())
    read = partial(_read, formula, inside, labeled=labeled, asked=asked)
    pieces = list[RowsRead]()
    if isinstance(frames, pd.DataFrame) and not has_label and not declared.imputed:
        with (
            suppress(KeyError, TypeError, ValueError, BeyondKnots),  # of which client: see below
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", BeyondKnots)
            pieces = [read(by_name)]
    if not pieces:
        pieces = [read({client: frame}) for client, frame in by_name.items()]
    numbers = {n: _joined([of.numbers[n] for of in pieces]) for n in pieces[0].numbers}
    if labeled and not asked and not formula.priors:
        warn_of_far_origins(declared, formula.agreed)
    counts = np.concatenate([of.counts for of in pieces])
    warn_of_far_values(numbers, formula.agreed, [*by_name], counts)
    is_labeled = _joined([*has_label.values()]) if has_label and labeled else None
    return ClientData(
        fields={n: _tensor(_joined([of.fields[n] for of in pieces])) for n in pieces[0].fields},
        offsets=offsets_of(torch.as_tensor(counts)),
        names=tuple(by_name),
        client_fields={n: _tensor(_joined([of.own[n] for of in pieces])) for n in pieces[0].own},
        frame_rows=FrameRows(
            torch.tensor(_joined([of.places for of in pieces])),
            index,
            None if is_labeled is None else torch.as_tensor(is_labeled),
        ),
    )


class RowsRead(NamedTuple):
    """Rows of K clients: their fields, those of clients, rows a client (K,), their places and their numbers."""

    fields: Fields
    own: Fields
    counts: NDArray[np.int64]
    places: NDArray[np.int64]
    numbers: Fields


def _read(
    formula: Any, inside: Inside, frames: Mapping[str, pd.DataFrame], *, labeled: bool, asked: bool
) -> RowsRead:
    """Return the rows of some clients as the program reads them; a fault is named of the first."""
    declared, schema, client = formula.declared, formula.agreed, next(iter(frames))
    of_response = () if labeled else (*declared.parts.labels, *_of_response(declared))
    kinds = {n: kind for n, kind in declared.rows_of.items() if n not in of_response}
    read = {n: schema.columns[n] for n in declared.columns if n not in of_response}
    frame = joined(frames)
    whole = complete(frame, kinds, client, declared.missing)
    owner = np.searchsorted(ends_of(frames), frame.index.get_indexer(whole.index), side="right")
    counts = np.bincount(owner, minlength=len(frames))
    if not counts.all():
        raise RowsFault("a client has no rows that are complete")
    least = schema.min_count if labeled and not asked else 1
    whole = with_known(whole, declared, client, least) if declared.imputed else whole
    ready = prepared(whole, read, client)
    judged = {*declared.parts.labels, *chain.from_iterable(map(columns_of, declared.described))}
    numbers = {n: ready[n].to_numpy() for n in read.keys() & judged if read[n].kind == "number"}
    imputed_fields = Fields()
    if names := declared.imputed:
        ready, gone = filled(names, ready)
        imputed_fields = fields_of(formula.layout, names, ready, gone, client)
    fields = Fields()
    for layout in formula.layouts:
        fields |= _of_layout(layout, ready, client)
        for term in layout.at("crossed"):
            fields[term.index] = _groups_of(term, whole, client)
        for term in layout.at("within"):
            by = tuple(name for name in term.group.by if name != declared.clients)
            names = np.split(group_names(whole, by, client), counts.cumsum()[:-1])
            pairs = zip(frames, names, strict=True)
            fields[term.index] = _joined([_inside(term, of, name, inside) for name, of in pairs])
    fields |= labels_of(declared, ready, whole, client) if labeled else _unlabeled(declared, ready)
    if not fields | imputed_fields:
        fields["ones"] = np.ones(len(ready))
    above = chain.from_iterable(layout.at("above") for layout in formula.layouts)
    own = {term.index: _one_group(term, whole, client, counts) for term in above}
    return RowsRead(fields | imputed_fields, own, counts, whole.index.to_numpy(), numbers)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _placed(frames: Any, clients: str) -> tuple[Mapping[str, pd.DataFrame], pd.Index[Any]]:
    """Return each client's rows, numbered as they stand in the frames, and their own labels."""
    if isinstance(frames, pd.DataFrame):
        return by_client(frames.set_axis(range(len(frames))), clients), frames.index
    placed: dict[str, pd.DataFrame] = {}
    labels: list[Any] = []
    for name, frame in by_client(frames, clients).items():
        placed[name] = frame.set_axis(range(len(labels), len(labels) + len(frame)))
        labels += frame.index.tolist()
    return placed, pd.Index(labels, tupleize_cols=False)


def _with_labels(
    declared: Declaration, frames: Mapping[str, pd.DataFrame]
) -> tuple[dict[str, pd.DataFrame], dict[str, NDArray[np.bool_]]]:
    """Return the rows to predict, and which have a label; the others get another row's, which is not scored."""
    of_label = [*declared.parts.labels, *_of_response(declared)]
    read = [name for name in declared.rows_of if name not in of_label]
    of_label = [name for name in of_label if name in declared.rows_of]
    whole, has_label, filler = {}, {}, None
    for client, frame in frames.items():
        own = frame[~incomplete(frame, read, client, "drop")]
        if not len(own):
            continue
        whole[client], has_label[client] = own, ~incomplete(own, of_label, client, "drop")
        if filler is None and has_label[client].any():
            filler = own.iloc[int(has_label[client].argmax())]
    lost_rows = len(frames) and sum(map(len, frames.values())) - sum(map(len, whole.values()))
    if not whole:
        raise ValueError("every row lacks a value of a predictor: there is nothing to predict")
    if lost_rows:
        what = f"{lost_rows} rows lack a value of a predictor, and are not predicted"
        warn(f"{what}: their answers are NaN")
    if filler is not None:
        for client, own in whole.items():
            filled = {name: own[name].where(has_label[client], filler[name]) for name in of_label}
            whole[client] = own.assign(**filled)
    return whole, has_label


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    made = torch.tensor(values)
    return made.to(torch.get_default_dtype()) if made.is_floating_point() else made


def _of_response(declared: Declaration) -> tuple[str, ...]:
    """Return the columns of additions that only a known response has, such as weights, and no term reads."""
    read = {*chain(*declared.groupings), *chain(*map(columns_of, declared.described))}
    return tuple(
        column
        for addition, column in declared.parts.additions.items()
        if addition not in declared.family.required and column not in read
    )


def _of_layout(layout: Layout, ready: pd.DataFrame, client: str) -> Fields:
    """Return the columns of a layout's terms, of those with a bar each."""
    fields, common = Fields(), layout.common
    matrix, offset = common.evaluate(ready, client)
    for design in layout.designs:
        design.warn_beyond(ready, client)
    if layout.read:
        fields[f"x{layout.suffix}"] = matrix[:, np.isin(common.columns, layout.read)]
    if layout.steps:
        fields["steps"] = matrix[:, np.isin(common.columns, layout.steps)]
    if common.offsets:
        fields["offset"] = offset
    for term in layout.groups:
        own = term.evaluate(ready, client)
        if term.place == "above":  # own coefficients take up the other columns
            columns = rows_of_above(layout, term)
            own = own * np.isin(term.columns, columns)
            if not columns:
                continue
        if not term.is_single:
            fields[term.field] = own
    return fields


def _inside(
    term: GroupTerm, names: NDArray[np.str_], client: str, inside: Inside
) -> NDArray[np.int64]:
    """Return the index of each row's group within its client, (n,); refuse new groups."""
    groups = inside.get((client, term.group.name))
    if groups is None:
        groups = tuple(sorted(set(names.tolist())))
        if len(groups) > term.size:
            what = f"{len(groups)} groups of '{term.group.name}', and at most {term.size} were agreed on"
            fix = f"agree on a new schema, or predict {term.size} of them at a time"
            raise ValueError(f"client '{client}' has {what}: {fix}")
        inside[client, term.group.name] = groups
    codes = index_in(groups, names)
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        what = f"the group '{names[row]}' of '{term.group.name}' in row {row}, which was not in the fit"
        fix = "correct it, leave the row out, or give these rows a client of their own, for "
        fix += "fit.personalize or hierfl.predict_from_prior"
        raise ValueError(f"client '{client}' has {what}: {fix}")
    return codes


def _names_of(term: GroupTerm, frame: pd.DataFrame, client: str) -> NDArray[np.str_]:
    if term.group.kind and {*term.group.by}.isdisjoint(frame.columns):
        return np.full(len(frame), client)  # its groups are the clients
    names: NDArray[np.str_] = group_names(frame, term.group.by, client)
    return names


def _groups_of(term: GroupTerm, frame: pd.DataFrame, client: str) -> NDArray[np.int64]:
    """Return the index of each row's group among the agreed ones, (n,); refuse other groups."""
    names = _names_of(term, frame, client)
    codes = index_in(term.levels, names)
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        what = f"the group '{names[row]}' of '{term.group.name}' in row {row}"
        fix = f"fit with it: hierfl.schema(..., levels={{'{term.group.name}': [...]}})"
        what = f"client '{client}' has {what}, not one of {', '.join(term.levels)}"
        raise ValueError(f"{what}: correct it, or {fix}")
    return codes


def _one_group(
    term: GroupTerm, frame: pd.DataFrame, client: str, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the index of each client's group, (K,); refuse a client that lies in several."""
    names = _names_of(term, frame, client)
    first = names[counts.cumsum() - counts]
    if (lies := names != np.repeat(first, counts)).any():
        pair = ", ".join(sorted([first[0], names[lies.argmax()]]))
        what = f"client '{client}' is in the groups {pair} of '{term.group.name}', and not in one"
        fix = "correct the rows, or give those of another group a client of their own"
        raise ValueError(f"{what}: {fix}")
    return _groups_of(term, frame, client)[counts.cumsum() - counts]


def _unlabeled(declared: Declaration, ready: pd.DataFrame) -> Fields:
    """Return the additions of rows without a response: trials, no censoring, equal weights."""
    plain = {"cens": 0.0, "event": False, "upper": 1.0, "entry": 0.0, "weights": 1.0}
    fields: Fields = {}
    for addition, name in declared.parts.additions.items():
        field = "cens" if addition == "event" else addition
        if addition in declared.family.required:
            fields[field] = ready[name].to_numpy(dtype=np.float64)
        else:
            fields[field] = np.full(len(ready), plain[addition])
    return fields


# ------------------------------------------------------------ the response
def labels_of(
    declared: Declaration, ready: pd.DataFrame, frame: pd.DataFrame, client: str
) -> Fields:
    """Return the response and its additions, checked by the family."""
    names = declared.parts.labels
    column = ready[names[0]] if len(names) == 1 else ready[[*names]]
    labels = column.cat.codes.to_numpy() if hasattr(column, "cat") else column.to_numpy()
    fields: Fields = {"y": np.asarray(labels, dtype=np.float64)}
    for addition, name in declared.parts.additions.items():
        if addition == "cens":
            fields["cens"] = _codes(ready[name], name, client)
        elif addition == "event":
            fields["cens"] = _of_events(ready[name], name, client)
        elif addition == "upper":
            check_column(frame, name, client)
            fields["upper"] = number_column(frame[name], name, client)  # NaN where there is none
        else:
            fields[addition] = ready[name].to_numpy(dtype=np.float64)
    if "upper" in fields:  # it is read of intervals alone, and may be missing elsewhere
        interval = fields.get("cens", np.zeros(len(frame))) == CENSORED["interval"]
        fields["upper"] = np.where(interval, fields["upper"], fields["y"])
    if "weights" in fields and not (fields["weights"] > 0.0).all():
        row = int((fields["weights"] <= 0.0).argmax())
        what = f"the weight in row {row} of client '{client}' is {fields['weights'][row]:g}"
        fix = "it must be above 0; leave out rows that do not count"
        raise RowsFault(f"{what}: {fix}", "a weight is not above 0")
    read = dict(fields)
    read.pop("weights", None)  # which count in the likelihood alone
    try:
        declared.family.check(read.pop("y"), read)
    except ValueError as error:
        raise RowsFault(
            f"column '{declared.parts.response}' of client '{client}': {error}",
            f"column '{declared.parts.response}' has a value that its family does not allow",
        ) from error
    return fields


def _codes(values: Any, name: str, client: str) -> NDArray[np.float64]:
    """Return brms's codes of censoring, from codes or from its words."""
    if hasattr(values, "cat"):
        words = values.astype(str).tolist()
        word = next((w for w in words if w not in CENSORED), None)
        if word is not None:
            fix = "censoring is none, right, left or interval"
            public = "has a word that does not name a kind of censoring"
            raise column_fault(f"has the value '{word}': {fix}", public, name, client)
        return np.array([CENSORED[w] for w in words], dtype=np.float64)
    return values.to_numpy(dtype=np.float64)


def _of_events(values: Any, name: str, client: str) -> NDArray[np.bool_]:
    """Return where times are right-censored, by events: 1 for an observed time, 0 for a censored one."""
    events = values.to_numpy(dtype=np.float64)
    if not np.isin(events, (0.0, 1.0)).all():
        row = int((~np.isin(events, (0.0, 1.0))).argmax())
        what = f"has the value {events[row]:g} in row {row}"
        fix = "event() is 1 for an observed time and 0 for a right-censored one"
        raise column_fault(f"{what}: {fix}", "of event() is not 0 or 1", name, client)
    return events == 0.0
