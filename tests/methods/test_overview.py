"""The table of all methods says of each what its code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hierfl
from hierfl.cli import app
from hierfl.core.trees import tree_leaves
from hierfl.engine.federation import federate
from hierfl.method import Method
from hierfl.methods.overview import ROWS, Row, as_markdown
from tests.methods.test_messages import OTHERS, WRAPPERS
from tests.methods.test_privacy import METHODS, SUMMARIES, TEN_ROUNDS
from tests.programs import federation

MADE: dict[str, Any] = {**METHODS, **TEN_ROUNDS, **SUMMARIES, **OTHERS}
DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


def made(row: Row) -> Method:
    """Return a method of a row's name, one whose clients keep something if any does."""
    names = [name for name in MADE if name.split()[0] == row.name]
    preferred = next((name for name in names if name.endswith("mean_field")), names[0])
    method: Method = MADE[preferred][0]()
    return method


def test_every_method_has_one_row() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
    assert set(names) == set(hierfl.methods.__all__) - WRAPPERS


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_rows_agree_with_the_code(row: Row) -> None:
    """What is disclosed, whether clients keep anything, and the source in the module's docstring."""
    method = made(row)
    assert row.discloses == method.discloses
    kept = tree_leaves(federate(method, federation()).client.own)
    assert bool(kept) == (row.kept != "nothing")
    module = inspect.getmodule(getattr(hierfl.methods, row.name))
    text = module.__doc__ if module else ""
    for number in re.findall(r"arXiv:\d+\.\d+|doi:\S+", row.source):
        assert number in (text or ""), number
    assert all(row[:-1])


def test_the_docs_have_the_same_table() -> None:
    assert as_markdown() in DOCS.read_text()


def test_the_command_prints_every_method() -> None:
    told = CliRunner().invoke(app, ["methods"])
    assert told.exit_code == 0
    for row in ROWS:
        assert row.name in told.output
