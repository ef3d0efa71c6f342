"""The files of a study's folder: what it was, and what was found, as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hierfl.comparisons.cells import cell_file, kept
from hierfl.comparisons.scores import Score
from hierfl.comparisons.study_file import Entry, Study
from hierfl.comparisons.tuning import chosen, told
from hierfl.core.outputs import replace_text

STUDY, RESULTS, TUNED, CURVES, COSTS, CLIENTS, CLASSES, ENTROPIES = (
    *("study.json", "results.csv", "tuning.csv", "curves.csv", "costs.csv"),
    *("clients.csv", "classes.csv", "entropies.csv"),
)
FILES = (STUDY, RESULTS, TUNED, CURVES, COSTS, CLIENTS, CLASSES, ENTROPIES)
# part of a cell -> its file, and the columns behind method and seed; entropies are of the first seed alone
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scores": (RESULTS, Score._fields),
    "curve": (CURVES, ("round", "P", "G")),
    "clients": (CLIENTS, ("round", "client", "score", "value")),
    "classes": (CLASSES, ("test", "class", "deviation")),
    "entropies": (ENTROPIES, ("rows", "client", "entropy")),
}
ALONG = ("P, new", "coherence", "distance")  # columns of curves where they are measured


def write(study: Study, out: Path) -> None:
    """Write the CSV files of a study from what is kept, in its order.

    Only costs.csv has seconds; the others are the same for every run of the study.
    """
    trials: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for entry in study.methods:
        for seed in study.run.seeds:
            found = kept(cell_file(out, study, entry, seed)[0])
            if found is None:
                continue
            who = {"method": entry.label, "seed": seed}
            for part, rows in parts.items():
                if part != "entropies" or seed == study.run.seeds[0]:
                    rows += [{**who, **row} for row in found.get(part, ())]
            diverged = "diverged" in found
            spent = {name: found.get(name) for name in ("kb_down", "kb_up", "kb_kept", "seconds")}
            costs.append({**who, "options": told(found["options"]), "diverged": diverged, **spent})
        if study.tuning.rounds:
            trials += _trials(out, study, entry)
    for part, (file, columns) in PARTS.items():
        along = [name for name in ALONG if any(name in row for row in parts[part])]
        if parts[part] or part in ("scores", "curve"):
            replace_text(out / file, as_csv(("method", "seed", *columns, *along), parts[part]))
        else:  # of the study before it was changed
            (out / file).unlink(missing_ok=True)
    replace_text(out / TUNED, as_csv(("method", "options", "score", "pruned", "chosen"), trials))
    names = ("method", "seed", "options", "diverged", "kb_down", "kb_up", "kb_kept", "seconds")
    replace_text(out / COSTS, as_csv(names, costs))


def _trials(out: Path, study: Study, entry: Entry) -> Iterable[dict[str, Any]]:
    try:
        found = chosen(out, study, entry)
    except ValueError:  # every trial diverged
        return []
    return [
        {
            "method": entry.label,
            "options": told(trial["options"]),
            "score": trial["score"],
            "pruned": trial["pruned"],
            "chosen": trial["options"] == found["options"],
        }
        for trial in found["trials"]
    ]


def as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as CSV; floats have all their digits, None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def study_of(out: Path) -> Study:
    """Return the study whose results are in a folder.

    Raises:
        FileNotFoundError: no study has run there.
    """
    file = out / STUDY
    if not file.exists():
        raise FileNotFoundError(
            f"{out} holds no results: `hierfl compare STUDY.toml --out {out}` makes them"
        )
    return Study.model_validate(json.loads(file.read_text()))
