"""What results print, as tables of great_tables."""

from typing import Any

import pandas as pd

from hierfl.core.arguments import spelled
from hierfl.core.extras import extras_for
from hierfl.core.tables import Shown, cell, has_names

LABEL, GROUP = " ", "  "  # columns of the names of rows, and of the headings of tables


@spelled
def great_table(result: Any) -> Any:
    """Return a printed result as a table of great_tables, to style and to write as HTML or LaTeX.

        table = hierfl.great_table(fit.summary())
        table.as_latex(), table.as_raw_html(), table.gtsave("summary.pdf")

    Word and LibreOffice open the HTML as a table: `table.write_raw_html("summary.doc")`. All rows
    are written. If a result has several tables, as a summary has, each is a group of rows.

    Args:
        result: a result that hierfl prints as a table, such as a `Summary`, `Effects`, `Compared`,
            `Description` or `KaplanMeier`; or a pandas frame.

    Returns:
        A `great_tables.GT`.

    Raises:
        ModuleNotFoundError: great_tables is not installed: `pip install "hierfl[tables]"`.
        TypeError: the result is not printed as a table.
        ValueError: two columns of a frame have the same name.
    """
    with extras_for("great_table"):
        from great_tables import GT
    shown = _shown(result)
    frames = [] if shown.frame is None else [("", shown.frame)]
    frames += shown.tables
    if not frames:
        raise TypeError(f"{type(result).__name__} prints no table: give fit.summary(), for example")
    frame = pd.concat([_labeled(*part) for part in frames], ignore_index=True).fillna("")
    used = {name: bool((frame[name] != "").any()) for name in (LABEL, GROUP)}
    frame = frame.drop(columns=[name for name, is_used in used.items() if not is_used])
    label, group = (name if used[name] else None for name in (LABEL, GROUP))
    made = GT(frame, rowname_col=label, groupname_col=group)
    title, _, subtitle = shown.title.partition("\n")
    made = made.tab_header(title, subtitle or None) if title else made
    for line in shown.note.splitlines():
        made = made.tab_source_note(line)
    return made


def _shown(result: Any) -> Shown:
    """Return what is printed of a result, or refuse it."""
    if isinstance(result, pd.DataFrame):
        return Shown("", result)
    if callable(of := getattr(result, "__tables__", None)):
        made = of()
        assert isinstance(made, Shown)
        return made
    raise TypeError(
        f"a {type(result).__name__} is not printed as a table: give a result, or a frame"
    )


def _labeled(heading: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the printed cells of all rows, with their names and a heading as columns."""
    names = [*map(str, frame.columns), LABEL, GROUP]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the frame has two columns '{twice[0]}': rename one of them")
    columns = {str(name): list(map(cell, frame.iloc[:, i])) for i, name in enumerate(frame.columns)}
    labels = list(map(cell, frame.index)) if has_names(frame) else [""] * len(frame)
    return pd.DataFrame({GROUP: [heading] * len(frame), LABEL: labels, **columns})
