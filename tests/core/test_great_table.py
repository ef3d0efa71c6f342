"""Results as tables of great_tables: all rows, headings as groups, every name escaped."""

import re
import sys
from typing import Any

import pandas as pd
import pytest

import hierfl
from hierfl.core.tables import Shown, shown_as

pytest.importorskip("great_tables")


@shown_as(
    lambda found: Shown(
        "A <b>title</b>\nbelow it",
        None,
        "A note of 5% & more.",
        tables=(
            ("Population", pd.DataFrame({"mean": [0.123456, 2.0]}, index=["age", "sex[<i>m]"])),
            ("By client", pd.DataFrame({"client": ["a_b"], "mean": [float("nan")]})),
        ),
    )
)
class Found:
    """A result with two tables."""


def test_tables_are_groups_of_rows_and_names_are_escaped() -> None:
    made = hierfl.great_table(Found())
    html = made.as_raw_html()
    assert "<b>title" not in html and "&lt;b&gt;title" in html and "sex[<i>m]" not in html
    rows = re.findall(r'<th scope="row"[^>]*>(.*?)</th>', html)
    assert rows == ["age", "sex[&lt;i&gt;m]", ""] and html.count('class="gt_group_heading"') == 2
    assert ">0.123</td>" in html and "nan" not in html.lower().split("<tbody")[1]
    latex = made.as_latex()
    assert r"a\_b" in latex and r"5\% \& more" in latex and "By client" in latex


def test_all_rows_are_written() -> None:
    made = hierfl.great_table(pd.DataFrame({"n": range(100)}))
    assert made.as_raw_html().count('class="gt_row') == 100


def test_table_1_and_a_summary_are_tables() -> None:
    frame = pd.DataFrame({"h": ["a"] * 5 + ["b"] * 5, "x": range(10), "y": [0, 1] * 5})
    found = hierfl.describe(frame, by="h")
    html = hierfl.great_table(found).as_raw_html()
    for text in ("x, mean (sd)", "4.5 (3.03)", "Rows of 1 client, by h"):
        assert text in html


def test_what_is_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="a int is not printed as a table"):
        hierfl.great_table(3)
    with pytest.raises(ValueError, match="two columns 'x'"):
        hierfl.great_table(pd.DataFrame([[1, 2]], columns=["x", "x"]))
    without: Any = None
    monkeypatch.setitem(sys.modules, "great_tables", without)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "hierfl\[tables\]"'):
        hierfl.great_table(pd.DataFrame())
