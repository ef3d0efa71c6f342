"""Numbers of finished runs, kept on disk so that a study goes on where it was stopped; and what a study hands back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

Say = Callable[[str], None]
Numbers = dict[str, Any]  # what JSON can hold


def quiet(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a part of a study found.

    Args:
        title: what was measured, with its unit.
        table: what is printed: a row a method or setting, a column a quantity; the index comes first.
        scores: every number, one row each, with the method, the seed and whatever else tells it apart.
        reading: sentences that say what the numbers come to.
        files: what was written -> what it holds.
    """

    title: str
    table: pd.DataFrame
    scores: pd.DataFrame
    reading: list[str] = field(default_factory=list)
    files: dict[Path, str] = field(default_factory=dict)

    def printed(self) -> Table:
        """The table for a terminal."""
        shown = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        frame = self.table.reset_index()
        for place, name in enumerate(frame.columns):
            shown.add_column(str(name), justify="left" if place == 0 else "right")
        for row in frame.itertuples(index=False):
            shown.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row))
        return shown

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
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
    """The numbers of one run, read from `out` where the same run has been finished, else worked out and written there.

    Args:
        out: the study's folder; runs are in `out/runs`, a JSON file each.
        name: of the run, for people: its method and seed.
        settings: all that the numbers depend on, as JSON holds it. Other settings, or another release of hierfl, are another
            run, kept beside this one.
        work: does the run.
        say: told the name of a run that has to be done.
    """
    described = {"hierfl": version("hierfl"), **settings}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:10]
    path = out / "runs" / f"{name}-{digest}.json"
    if not path.exists():
        say(name)
        whole = json.dumps({"settings": described, "numbers": work()}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(whole)
        os.replace(
            unfinished, path
        )  # a file that is there is whole, wherever the study was stopped
    numbers: Numbers = json.loads(path.read_text())["numbers"]
    return numbers


def spread(
    scores: pd.DataFrame, by: str | list[str], value: str, order: Iterable[str] | None = None
) -> pd.DataFrame:
    """Mean, standard deviation (ddof 1, over seeds) and number of runs of a column: a row a group.

    >>> frame = pd.DataFrame({"method": ["a", "a"], "accuracy": [1.0, 3.0]})
    >>> spread(frame, "method", "accuracy").loc["a"].tolist()
    [2.0, 1.4142135623730951, 2.0]
    """
    found = scores.groupby(by, sort=False)[value].agg(["mean", "std", "count"])
    return found if order is None else found.reindex(list(order))
