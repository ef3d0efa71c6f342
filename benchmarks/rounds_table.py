"""How `benchmarks.rounds` presents its results: a table to print, and benchmarks/ROUNDS.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

WITHIN = 0.1  # allowed error of a global mean, in reference standard deviations
Record = dict[str, Any]
POOLED = "pooled NUTS"  # its row: what a user would run who may pool
# heading -> the key of a record
HEADINGS = {
    "method": "",
    "rounds to target": "rounds",
    "bytes to target": "bytes",
    "rounds run": "rounds_in_all",
    "error of means, sd: max": "max_mean_error_sd",
    "max local": "max_local_error_sd",
    "median": "median_mean_error_sd",
    "sd ratio: min": "sd_ratio_min",
    "max": "sd_ratio_max",
    "k-hat": "k_hat",
    "effective": "effective",
    "seconds": "seconds",
}


def row(name: str, record: Record) -> tuple[str, ...]:
    """Return the cells of one method's row."""
    if "stops" in record:
        return (name, "failed", *[""] * (len(HEADINGS) - 2))
    shown = dict(record)
    if name != POOLED:
        shown["rounds"] = record["rounds"] or "never"
        shown["bytes"] = f"{record['bytes']:,}"
    cells = [shown.get(key) for key in list(HEADINGS.values())[1:]]
    return (name, *("" if cell is None else str(cell) for cell in cells))


def table(problem: str, records: Mapping[str, Record]) -> Table:
    """Return the table to print, one row for each method."""
    out = Table(title=f"{problem}: target is every global mean within {WITHIN} sd ({machine()})")
    for heading in HEADINGS:
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for name, record in records.items():
        out.add_row(*row(name, record))
    return out


def machine() -> str:
    """Describe the machine that the seconds were measured on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


INTRODUCTION = [
    "# Rounds and bytes until a posterior is accurate",
    "",
    "The target is that the mean of every entry of every global site is within",
    f"{WITHIN} reference standard deviations (sd) of the reference mean, and stays so.",
    "",
    "* **rounds to target**, **bytes to target**: rounds until the target is reached, and bytes to",
    "  and from all clients until then. If it is never reached, the bytes are those of all rounds.",
    "* **rounds run**: rounds in all.",
    "* **error of means**, **sd ratio**: errors of the posterior after the last round, local sites",
    "  included, from 1,000 to 8,000 draws (0.03 to 0.011 sd of noise).",
    "* **k-hat**, **effective**: Pareto shape of the method's own weights (0.7 or more: do not "
    "trust",
    "  the answer), and the draws that they leave, where the method weighs.",
    "* **seconds**: wall-clock time of clients and server, whatever else the machine was doing.",
    "* **pooled NUTS**: what a user would run who may pool all rows: NumPyro, two chains of",
    "  500 + 1,000 steps side by side, compiling included (`python -m benchmarks.pooled_nuts`).",
    "",
    "The references of radon, hospitals, eight schools and the demo are long runs of Stan or NUTS;",
    "those of the others are long pooled NUTS of the same program. Written by",
    "`python -m benchmarks.rounds --write`.",
]


def section(problem: str, records: Mapping[str, Record]) -> list[str]:
    """Return one problem's section of benchmarks/ROUNDS.md, line by line."""
    return [
        "",
        f"## {problem}",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        *("| " + " | ".join(row(name, record)) + " |" for name, record in records.items()),
        "",
        *(
            f"{name} failed: {record['stops']}\n"
            for name, record in records.items()
            if "stops" in record
        ),
        *(
            f"Measured on {where}."
            for where in sorted({r["machine"] for r in records.values() if "machine" in r})
        ),
    ]


def write(found: Mapping[str, Mapping[str, Record]]) -> Path:
    """Write the tables of all problems to benchmarks/ROUNDS.md; return its path."""
    lines = [*INTRODUCTION]
    for problem, records in found.items():
        if records:
            lines += section(problem, records)
    file = Path(__file__).with_name("ROUNDS.md")
    file.write_text("\n".join(lines) + "\n")
    return file
