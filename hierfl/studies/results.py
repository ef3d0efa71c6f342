"""Results of a study, and the store of finished runs from which an interrupted study resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from hierfl.core.outputs import replace_text

Say = Callable[[str], None]
Numbers = dict[str, Any]  # JSON-compatible values only


def quiet(line: str) -> None:
    """Discard a line of progress."""


@dataclass(frozen=True, eq=False)
class Found:
    """Result of one part of a study.

    Args:
        title: what was measured, with its unit.
        table: the table to print: one row for each method or setting, one column for each quantity; the index
            is printed as the first column.
        scores: every number in long form, with the method, the seed and whatever else identifies it.
        reading: sentences that summarize the numbers.
        files: path of each file written -> its content in words.
    """

    title: str
    table: pd.DataFrame
    scores: pd.DataFrame
    reading: list[str] = field(default_factory=list)
    files: dict[Path, str] = field(default_factory=dict)

    def printed(self) -> Table:
        """Format the table for a terminal."""
        shown = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        frame = self.table.reset_index()
        for place, name in enumerate(frame.columns):
            shown.add_column(str(name), justify="left" if place == 0 else "right")
        for row in frame.itertuples(index=False):
            shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row))
        return shown

    def as_markdown(self) -> str:
        """Format title, table and reading for a page of documentation."""
        frame = self.table.reset_index().map(
            lambda v: f"{v:.2f}" if isinstance(v, float) else str(v)
        )
        head = [str(name) for name in frame.columns]
        rule = ["---", *("---:" for _ in head[1:])]
        rows = [head, rule, *frame.to_numpy().tolist()]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join(
            [f"{self.title}:", "", *lines, "", *(f"* {line}" for line in self.reading)]
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible values."""
        return {
            "title": self.title,
            "table": json.loads(self.table.reset_index().to_json(orient="records")),
            "scores": json.loads(self.scores.to_json(orient="records", double_precision=15)),
            "reading": self.reading,
            "files": {str(path): what for path, what in self.files.items()},
        }


def kept(
    out: Path, name: str, settings: Mapping[str, Any], work: Callable[[], Numbers], say: Say = quiet
) -> Numbers:
    """Return the numbers of one run: read from `out` if it has finished, else computed and saved.

    Args:
        out: the study's folder; each run is one JSON file in `out/runs`.
        name: readable name of the run, such as its method and seed.
        settings: everything the numbers depend on, as JSON-compatible values. A run with other settings, or
            by another release of hierfl, is a different run, saved beside this one.
        work: computes the numbers.
        say: called with `name` if the run has to be computed.

    Raises:
        ValueError: the run's file is damaged.
    """
    described = {"hierfl": version("hierfl"), **settings}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:10]
    path = out / "runs" / f"{name}-{digest}.json"
    if not path.exists():
        say(name)
        whole = json.dumps({"settings": described, "numbers": work()}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, whole)  # complete, however the study is interrupted
    try:
        numbers: Numbers = json.loads(path.read_text())["numbers"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is damaged ({error}): remove it, and the run is computed again"
        ) from error
    return numbers


def put_into(page: Path, name: str, found: Sequence[Found]) -> None:
    """Replace a study's numbers on a page of documentation by those of a run.

    Args:
        page: of Markdown, with the lines `<!-- NAME -->` and `<!-- end of NAME -->`.
        name: of the block, such as the study's.
        found: the results that stand there from now on.

    Raises:
        ValueError: the page has no such block.
    """
    put_text(page, name, "\n\n".join(part.as_markdown() for part in found))


def put_text(page: Path, name: str, block: str) -> None:
    """Replace a block of a page of documentation, as `put_into` does.

    Raises:
        ValueError: the page has no such block.
    """
    text, first, last = page.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, opened, rest = text.partition(first)
    _, closed, after = rest.partition(last)
    if not (opened and closed):
        raise ValueError(f"{page} has no block '{name}': put the lines {first} and {last} into it")
    page.write_text(f"{before}{first}\n{block}\n{last}{after}")
