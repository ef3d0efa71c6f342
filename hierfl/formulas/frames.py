"""Frames in place of `ClientData`, wherever the model is a formula."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import pandas as pd

from hierfl.data.clients import ClientData
from hierfl.formulas.client_data import client_data
from hierfl.formulas.columns import by_client
from hierfl.formulas.formula import Formula

Frames = pd.DataFrame | Mapping[str, pd.DataFrame]
M = TypeVar("M")


def of_frames(model: M, data: Any, validation: Any) -> tuple[M, Any, Any]:
    """Return a formula with its schema, and its rows, as `hierfl.fit` runs them; others as they are."""
    within = None if isinstance(model, Formula) else getattr(model, "model", None)  # of a method
    if isinstance(within, Formula) and not isinstance(data, ClientData):
        if not within.has_schema:
            raise ValueError(
                f"the method's formula '{within.text}' has no schema: give the method "
                "formula.on(frame), and fit it to the frame"
            )
        return (
            model,
            rows_of(within, data),
            None if validation is None else rows_of(within, validation),
        )
    if not isinstance(model, Formula):
        return model, data, validation
    ready: Any = model if isinstance(data, ClientData) else model.on(data)
    return ready, rows_of(ready, data), None if validation is None else rows_of(ready, validation)


def rows_of(model: object, rows: Any, fitted: Collection[str] = (), *, asked: bool = False) -> Any:
    """Return frames of a formula, and only those, as a program's rows; when `asked` some may lack the response."""
    if not isinstance(model, Formula) or isinstance(rows, ClientData):
        return rows
    if model.layout.at("within"):
        model.check_inside([name for name in by_client(rows, model.clients) if name in fitted])
    frames = list(rows.values()) if isinstance(rows, Mapping) else [rows]
    response = model.declared.parts.response
    labeled = all(response in getattr(frame, "columns", ()) for frame in frames)
    return client_data(
        model.declared,
        model.agreed,
        model.layout,
        rows,
        model._inside,
        labeled=labeled,
        asked=asked,
    )
