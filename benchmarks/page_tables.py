"""Tables of benchmarks on pages of the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from hierfl.comparisons.printed_table import put_block


@dataclass(frozen=True, eq=False)
class Titled:
    """A table with its title; the index is its first column."""

    title: str
    table: pd.DataFrame

    def as_markdown(self) -> str:
        """Return title and table."""
        frame = self.table.reset_index().astype(str)
        head = list(map(str, frame.columns))
        rule = ["---", *("---:" for _ in head[1:])]
        rows = [f"| {' | '.join(row)} |" for row in (head, rule, *frame.to_numpy().tolist())]
        return "\n".join([f"{self.title}:", "", *rows, ""])


def put_tables(page: Path, name: str, *found: Titled) -> None:
    """Replace the block of a page by tables."""
    put_block(page, name, "\n\n".join(part.as_markdown() for part in found))
