"""Results as tables in a terminal and in a notebook; tensors are never written out."""

from __future__ import annotations

import html
import math
import numbers
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

FIRST, LAST = 30, 8  # rows that are printed of a longer table
WIDTH = 110  # of a line of words
LONGEST_CELL = 60
GAP = "..."

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True, eq=False)
class Shown:
    """What is printed of a result: title, frame, note under it, further tables with headings."""

    title: str
    frame: pd.DataFrame | None = None
    note: str = ""
    tables: tuple[tuple[str, pd.DataFrame], ...] = ()


def printed(made: Class) -> Class:
    """Let the objects of a class print their `__tables__`, a `Shown`: as text, and as HTML in a notebook."""
    for name, form in (("__repr__", text_of), ("_repr_html_", html_of)):

        def written(result: Any, form: Callable[[Shown], str] = form) -> str:
            return form(result.__tables__())

        written.__name__, written.__qualname__ = name, f"{made.__qualname__}.{name}"
        setattr(made, name, written)
    return made


def text_of(shown: Shown) -> str:
    """Return a result as text.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"site": ["mu", "tau"], "mean": [0.12345, 1.0], "sd": [0.5, float("nan")]})
    >>> print(text_of(Shown("Two sites", frame, "All is well.")))
    Two sites
    site  mean  sd
      mu 0.123 0.5
     tau     1
    All is well.
    """
    blocks = [shown.title]
    if shown.frame is not None and len(shown.frame):
        blocks += _lines_of(shown.frame)
    for heading, frame in shown.tables:
        blocks += ["", heading, *_lines_of(frame)]
    blocks += [""] if shown.tables else []
    for line in shown.note.splitlines():
        blocks += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(blocks)


def _lines_of(frame: pd.DataFrame) -> list[str]:
    table = cells(frame).to_string(index=has_names(frame))
    return [*(line.rstrip() for line in table.splitlines()), *_left_over(frame)]


def html_of(shown: Shown) -> str:
    """Return a result as HTML; names and words are escaped."""
    blocks = [f"<p><b>{html.escape(shown.title)}</b></p>"]
    if shown.frame is not None and len(shown.frame):
        blocks += _html_of_frame(shown.frame)
    for heading, frame in shown.tables:
        blocks += [f"<p><b>{html.escape(heading)}</b></p>", *_html_of_frame(frame)]
    blocks += [f"<p>{html.escape(line)}</p>" for line in shown.note.splitlines()]
    return "\n".join(blocks)


def _html_of_frame(frame: pd.DataFrame) -> list[str]:
    table = cells(frame).to_html(index=has_names(frame), border=0, escape=True)
    return [table, *(f"<p>{html.escape(line)}</p>" for line in _left_over(frame))]


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the printed cells of a frame: three significant digits, nothing for NaN."""
    import pandas as pd  # slow to import

    long = _is_long(frame)
    some = pd.concat([frame.iloc[:FIRST], frame.iloc[-LAST:]]) if long else frame
    columns = {str(name): list(map(cell, some.iloc[:, i])) for i, name in enumerate(some.columns)}
    table = pd.DataFrame(columns)
    table.index = pd.Index(list(map(cell, some.index)), name=frame.index.name)
    if long:
        gap = pd.DataFrame([[GAP] * table.shape[1]], columns=table.columns, index=[GAP])
        table = pd.concat([table.iloc[:FIRST], gap, table.iloc[FIRST:]])
        table.index.name = frame.index.name
    return table


def cell(value: Any) -> str:
    """Return one entry of a table.

    >>> cell(12345.678), cell(0.00012345), cell(3), cell(float("nan")), cell(True), cell("north")
    ('12346', '0.000123', '3', '', 'yes', 'north')
    """
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value)}"
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isnan(number):
            return ""
        return f"{number:.0f}" if 1000.0 <= abs(number) < 1e7 else f"{number:.3g}"
    text = str(value).replace("\n", " ")
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - len(GAP)] + GAP


def _is_long(frame: pd.DataFrame) -> bool:
    return len(frame) > FIRST + LAST + 1


def _left_over(frame: pd.DataFrame) -> list[str]:
    return [f"{len(frame):,} rows in all, of which these are the ends."] if _is_long(frame) else []


def has_names(frame: pd.DataFrame) -> bool:
    """Return whether the index of a frame says something that its position does not."""
    return type(frame.index).__name__ != "RangeIndex" or frame.index.name is not None


def shapes(fields: Iterable[tuple[str, Any]]) -> str:
    """Return the shapes of named tensors in one line.

    >>> import torch
    >>> shapes([("x", torch.zeros(3, 2)), ("y", torch.zeros(3))])
    'x: (3, 2), y: (3,)'
    """
    return ", ".join(f"{name}: {tuple(value.shape)}" for name, value in fields)


def table_of_rows(values: Mapping[str, Tensor | None]) -> pd.DataFrame:
    """Return values by row as a table with a line per row; several columns where a row has several."""
    import pandas as pd

    columns: dict[str, Tensor] = {}
    for name, value in values.items():
        if value is not None and value.dim() > 1:
            columns |= {f"{name}[{k}]": v for k, v in enumerate(value.flatten(1).unbind(1))}
        elif value is not None:
            columns[name] = value
    return pd.DataFrame({name: value.numpy() for name, value in columns.items()})
