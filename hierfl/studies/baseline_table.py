"""The table of `baselines`: a row for each method, means over seeds, and what it shows in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hierfl.studies.baseline_methods import LEFT_OUT
from hierfl.studies.results import Found

# column -> heading, factor, and form of the number
MEASURED = {
    "personal": ("P, %", 1.0, "{:.1f}"),
    "global": ("G, %", 1.0, "{:.1f}"),
    "log_score": ("log score", 1.0, "{:.3f}"),
    "calibration_error": ("calibration error, %", 1.0, "{:.1f}"),
}
COUNTED = {
    "bytes_down": ("kB down", 1e-3, "{:.1f}"),
    "bytes_up": ("kB up", 1e-3, "{:.1f}"),
    "state": ("kB kept", 1e-3, "{:.1f}"),
    "seconds": ("seconds", 1.0, "{:.3f}"),
    "evaluations": ("evaluations", 1.0, "{:.0f}"),
}
DIVERGED = "diverged"
LIMIT = 1.5  # points, from a published number
# P in %, Shi et al. 2023 (FedABML), arXiv:2310.09183, Table 1: Fashion-MNIST with 200 clients, EMNIST with 150
PUBLISHED: dict[str, dict[str, float]] = {
    "fashion": {
        "local_only": 95.52,
        "fedavg": 81.10,
        "fedavg+FT": 96.50,
        "fedprox": 81.06,
        "fedprox+FT": 96.42,
        "scaffold": 80.86,
        "scaffold+FT": 94.38,
        "per_fedavg": 96.19,
        "pfedme": 96.44,
        "ditto": 96.39,
        "pfedbayes": 95.88,
        "fedabml": 96.57,
    },
    "emnist": {
        "local_only": 90.88,
        "fedavg": 57.63,
        "fedavg+FT": 95.38,
        "fedprox": 57.59,
        "fedprox+FT": 95.24,
        "scaffold": 54.11,
        "scaffold+FT": 88.66,
        "fedrep": 95.51,
        "fedbabu": 91.82,
        "fedpop": 95.85,
        "per_fedavg": 94.70,
        "pfedme": 94.45,
        "ditto": 94.07,
        "pfedbayes": 94.61,
        "fedabml": 95.95,
    },
}
TITLE = (
    "Methods by client: accuracy served (P) and without own rows (G), log score and calibration error of P; "
    "received, sent and kept by a client; seconds and gradient evaluations of a round"
)


def collected(records: Sequence[dict[str, Any]], path: Path, *, is_tuned: bool) -> Found:
    """Write every number to a file, and return the table of means over seeds.

    Args:
        records: a row for each run; a run that diverged has None for `personal`.
        path: of the file.
        is_tuned: whether step sizes were chosen on validation rows.
    """
    scores = pd.DataFrame(list(records)).reindex(
        columns=["images", "method", "seed", "lr", *MEASURED, "by_chance", *COUNTED]
    )
    numbers = [name for name in scores.columns if name not in ("images", "method")]
    scores[numbers] = scores[numbers].apply(pd.to_numeric)
    scores.to_csv(path, index=False)
    return Found(
        TITLE,
        table(scores),
        scores,
        reading(scores, is_tuned=is_tuned),
        {path: "every number by images, method and seed"},
    )


def table(scores: pd.DataFrame) -> pd.DataFrame:
    """Format mean ± sd over seeds of what is measured, and the mean of what is counted."""
    by = ["method"] if scores["images"].nunique() == 1 else ["images", "method"]
    grouped = scores.groupby(by, sort=False)
    mean, sd = (getattr(grouped[[*MEASURED, *COUNTED]], kind)() for kind in ("mean", "std"))
    shown = pd.DataFrame(index=mean.index)
    for column, (heading, factor, form) in {**MEASURED, **COUNTED}.items():
        text = (factor * mean[column]).map(form.format)
        if column in MEASURED and scores["seed"].nunique() > 1:
            text = text + (factor * sd[column]).map(f" ± {form}".format)
        shown[heading] = text.where(mean[column].notna(), DIVERGED)
    known = {
        (images, name): value for images, each in PUBLISHED.items() for name, value in each.items()
    }
    keys = [
        (images, name) for images, name in scores.groupby(["images", "method"], sort=False).groups
    ]
    if any(key in known for key in keys):
        published = [f"{known[key]:.1f}" if key in known else "" for key in keys]
        shown.insert(1, "published P, %", published)
    return shown


def reading(scores: pd.DataFrame, *, is_tuned: bool) -> list[str]:
    """State which methods are best, how they were tuned, and what is left out."""
    lines = []
    for name, own in scores.groupby("images", sort=False):
        mean = own.groupby("method", sort=False)[["personal", "global", "log_score"]].mean()
        mean = mean.dropna()
        if mean.empty:
            continue
        top = mean.idxmax()
        lines.append(
            f"{name}: P is highest for {top['personal']} ({mean['personal'].max():.1f} %), G for {top['global']} "
            f"({mean['global'].max():.1f} %), the log score for {top['log_score']} "
            f"({mean['log_score'].max():.3f})."
        )
    if "fedvi" in set(scores["method"]):
        lines.append(
            "fedvi reads a client's rows, without labels, for its G too; the other G read none."
        )
    lines += [
        line
        for line in (
            _chance(scores),
            _diverged(scores),
            _apart(scores),
            _tuning(scores, is_tuned),
        )
        if line
    ]
    left = [f"{name} ({why})" for name, why in LEFT_OUT.items()]
    return [*lines, f"Left out of `hierfl.methods`: {', '.join(left)}."]


def _chance(scores: pd.DataFrame) -> str:
    low, high = scores["by_chance"].min(), scores["by_chance"].max()
    if pd.isna(low):
        return ""
    return f"By chance alone the calibration error would be {low:.1f} to {high:.1f} %."


def _diverged(scores: pd.DataFrame) -> str:
    lost = scores[scores["personal"].isna()]
    each = [f"{row.method} (seed {row.seed})" for row in lost.itertuples()]
    return f"Runs that diverged, and count in no mean: {', '.join(each)}." if each else ""


def _apart(scores: pd.DataFrame) -> str:
    """State where P is more than 1.5 points from the published number."""
    means = scores.groupby(["images", "method"], sort=False)["personal"].mean()
    each = [
        f"{images} {name} {mean - PUBLISHED[images][name]:+.1f}"
        for (images, name), mean in means.items()
        if name in PUBLISHED.get(images, {}) and abs(mean - PUBLISHED[images][name]) > LIMIT
    ]
    return f"More than {LIMIT} points from the published P: {', '.join(each)}." if each else ""


def _tuning(scores: pd.DataFrame, is_tuned: bool) -> str:
    if is_tuned:
        chosen = scores.dropna(subset=["lr"]).groupby(["images", "method"], sort=False)["lr"]
        each = [f"{images} {method} {own.iloc[0]:.3g}" for (images, method), own in chosen]
        return f"Step sizes, chosen on validation rows from one grid: {'; '.join(each)}."
    used = [f"{lr:g}" for lr in sorted(scores["lr"].dropna().unique())]
    if len(used) < 2:
        return f"Nothing is tuned: the step size is {', '.join(used)}."
    return (
        f"Nothing is tuned: the step size is {used[-1]} of gradient descent, and {used[0]} of Adam."
    )
