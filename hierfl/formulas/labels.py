"""The response of a formula and its additions, as the fields that its likelihood reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hierfl.data.arrays import RowsFault
from hierfl.formulas.columns import CENSORED, check_column, column_fault, number_column
from hierfl.formulas.declaration import Declaration

Fields = dict[str, NDArray[Any]]


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
            f"column '{declared.parts.response}' has a value that its family does not have",
        ) from error
    return fields


def _codes(values: Any, name: str, client: str) -> NDArray[np.float64]:
    """Return brms's codes of censoring, from codes or from its words."""
    if hasattr(values, "cat"):
        words = values.astype(str).tolist()
        word = next((w for w in words if w not in CENSORED), None)
        if word is not None:
            fix = "censoring is none, right, left or interval"
            public = "has a word that is none of censoring"
            raise column_fault(f"has the value '{word}': {fix}", public, name, client)
        return np.array([CENSORED[w] for w in words], dtype=np.float64)
    return values.to_numpy(dtype=np.float64)


def _of_events(values: Any, name: str, client: str) -> NDArray[np.float64]:
    """Return codes of censoring from events: 1 for an observed time, 0 for a right-censored one."""
    events = values.to_numpy(dtype=np.float64)
    if not np.isin(events, (0.0, 1.0)).all():
        row = int((~np.isin(events, (0.0, 1.0))).argmax())
        what = f"has the value {events[row]:g} in row {row}"
        fix = "event() is 1 for an observed time and 0 for a right-censored one"
        raise column_fault(f"{what}: {fix}", "of event() is not 0 or 1", name, client)
    return 1.0 - events
