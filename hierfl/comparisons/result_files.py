"""The files of a study's folder: what it was, and what was found, as CSV."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from hierfl.comparisons.score_means import Score
from hierfl.comparisons.study_file import Study
from hierfl.comparisons.tuning import in_words
from hierfl.core.disk import replace_text

Found = dict[str, Any] | None  # of a search or a cell; None: it failed
Cells = Mapping[tuple[str, int], Found]  # by label and seed

STUDY, RESULTS, TUNED = "study.json", "results.csv", "tuning.csv"
CURVES, COSTS = "curves.csv", "costs.csv"
SPENT = ("kb_down", "kb_up", "kb_kept", "seconds", "round_seconds", "evaluations")
FIRST_SEED = ("entropies", "lines")  # parts of a cell that are written for the first seed alone
# part of a cell -> its file, and its columns after method and seed, before any of `OPTIONAL`
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scores": (RESULTS, Score._fields),
    "curve": (CURVES, ("round", "P", "G")),
    "clients": ("clients.csv", ("round", "client", "score", "value")),
    "classes": ("classes.csv", ("test", "class", "deviation")),
    "entropies": ("entropies.csv", ("rows", "client", "entropy")),
    "lines": ("lines.csv", ("score", "round", "client", "draw", "w0", "w1")),
}
FILES = (STUDY, TUNED, COSTS, *(file for file, _ in PARTS.values()))
ALWAYS = ("scores", "curve")  # parts that each study has; of the others, each has a figure
FIGURES = ("figure.png", *(f"figure-{part}.png" for part in PARTS if part not in ALWAYS))
ALONG = ("P, new", "coherence", "distance")  # columns of curves where they are measured
OPTIONAL = (*ALONG, "w2")


def write(study: Study, out: Path, choices: Mapping[str, Found], cells: Cells) -> None:
    """Write the CSV files of a study, of choices by label; all but costs.csv are the same for every run of it."""
    costs: list[dict[str, Any]] = []
    rows_of: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for entry in study.methods:
        for seed in study.run.seeds:
            cell = cells.get((entry.label, seed))
            if cell is None:
                continue
            who = {"method": entry.label, "seed": seed}
            for part, rows in rows_of.items():
                if part not in FIRST_SEED or seed == study.run.seeds[0]:
                    rows += [{**who, **row} for row in cell.get(part, ())]
            how = {"options": in_words(cell["options"]), "diverged": "diverged" in cell}
            costs.append({**who, **how, **{name: cell.get(name) for name in SPENT}})
    for part, (file, columns) in PARTS.items():
        along = [name for name in OPTIONAL if any(name in row for row in rows_of[part])]
        if rows_of[part] or part in ALWAYS:
            replace_text(out / file, as_csv(("method", "seed", *columns, *along), rows_of[part]))
        else:  # of the study before it was changed
            (out / file).unlink(missing_ok=True)
    trials = [
        {
            "method": label,
            "options": in_words(trial["options"]),
            "score": trial["score"],
            "chosen": trial["options"] == choice["options"],
        }
        for label, choice in choices.items()
        if choice is not None
        for trial in choice["trials"]
    ]
    replace_text(out / TUNED, as_csv(("method", "options", "score", "chosen"), trials))
    names = ("method", "seed", "options", "diverged", *SPENT)
    replace_text(out / COSTS, as_csv(names, costs))


def as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as CSV; floats have all their digits, None is empty."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object).to_csv(index=False)


def _frame(name: str, texts: Sequence[str], numbers: Sequence[str], out: Path) -> pd.DataFrame:
    """Return a CSV file of a study's folder, with texts as they are, and numbers or booleans."""
    file = out / name
    try:
        frame = pd.read_csv(file, dtype=dict.fromkeys(texts, "str"))
        frame[list(texts)] = frame[list(texts)].fillna("")
        frame[list(numbers)].astype(float)  # refuses words
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file} is not what `hierfl compare` wrote: {error}") from error
    return frame


# (out) -> the table of a study's folder
results = partial(
    _frame,
    RESULTS,
    ("method", "score", "clients", "test", "weighting", "metric"),
    ("seed", "adapted", "value"),
)
costs_of = partial(_frame, COSTS, ("method",), ("seed", "diverged"))
trials_of = partial(_frame, TUNED, ("method", "options"), ("score", "chosen"))
curves_of = partial(_frame, CURVES, ("method",), ("seed", "round", "P", "G"))


def part_of(out: Path, part: str) -> pd.DataFrame | None:
    """Return what a study measured besides: a key of `PARTS`; None where it did not."""
    file, columns = PARTS[part]
    if not (out / file).exists():
        return None
    numbers = {"seed", "round", "value", "class", "deviation", "entropy", "draw", "w0", "w1"}
    every = ("method", "seed", *columns)
    texts = [name for name in every if name not in numbers]
    return _frame(file, texts, [name for name in every if name in numbers], out)


def study_of(out: Path) -> Study:
    """Return the study whose results are in a folder."""
    file = out / STUDY
    if not file.exists():
        fix = f"`hierfl compare STUDY.toml --out {out}` makes them"
        raise FileNotFoundError(f"{out} holds no results: {fix}")
    try:
        return Study.model_validate(json.loads(file.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not what `hierfl compare` wrote: {error}") from error
