"""The tables of methods in PAGES of docs/, made from the code.

    python -m benchmarks.method_tables            which pages are not up to date
    python -m benchmarks.method_tables --write    write them

A table stands between <!-- methods: NAME --> and <!-- end of methods -->.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hierfl.comparisons.result_files import results, study_of
from hierfl.comparisons.score_table import ScoreColumn, by_seed
from hierfl.methods.about import HEADINGS, About, Wrapper, described

RIVALS = Path(__file__).parents[1] / "examples" / "studies" / "results" / "bayesian-rivals"
FEDERATIONS = {  # variant of the study -> its data
    "fashion-reduced": "Fashion-MNIST",
    "emnist-reduced": "EMNIST",
    "femnist-reduced": "FEMNIST",
    "heart-reduced": "hospitals",
    "wisdm-reduced": "WISDM",
}
MEASURES = {  # (score, metric) of the study -> its name
    ("P", "accuracy"): "P",
    ("P", "log_score"): "log score",
    ("P", "calibration_error"): "calibration",
    ("G", "accuracy"): "G",
    ("P", "auroc"): "unknown images",
}
STUDY = "studies.md#bayesian-rivals-every-method-with-a-posterior"
DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("methods.md", "methods_compared.md", "wrappers.md", "crossing.md")
BLOCK = re.compile(r"(<!-- methods: (\w+) -->\n).*?(<!-- end of methods -->)", re.DOTALL)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    escaped = (" | ".join(cell.replace("*", r"\*") for cell in row) for row in rows)
    return "\n".join([*lines, *(f"| {line} |" for line in escaped)])


def firsts() -> dict[str, str]:
    """Return, by method, where its mean over seeds is the best of the study bayesian-rivals."""
    found: dict[str, dict[str, list[str]]] = {}
    for variant, data in FEDERATIONS.items():
        if not (RIVALS / variant).exists():  # of a form that has not been run
            continue
        study, scores = study_of(RIVALS / variant), results(RIVALS / variant)
        for (score, metric), name in MEASURES.items():
            tests = study.evaluation.foreign if metric == "auroc" else ("local",)
            for test in tests:
                column = ScoreColumn(score, "participating", test, metric)
                values = by_seed(scores, column, study.evaluation.weighting)
                best, *tuned = str(column.merit(values).mean(axis=1).idxmax()).split("+")
                where = f"{data} (fine-tuned)" if tuned else data
                found.setdefault(best, {}).setdefault(name, []).append(where)
    return {
        method: "; ".join(f"{name}: {', '.join(where)}" for name, where in by_name.items())
        for method, by_name in found.items()
    }


def tables() -> dict[str, str]:
    """Return the tables by name."""
    methods, wrappers, best = described(About), described(Wrapper), firsts()
    columns = {field: heading for field, heading in HEADINGS.items() if field != "source"}
    return {
        "inferred": table(
            (
                "`hierfl.methods.`",
                "what it infers",
                "source",
                f"best in [`bayesian-rivals`]({STUDY})",
            ),
            (
                (f"`{name}`", about.infers, about.source, best.get(name, ""))
                for name, about in methods.items()
            ),
        ),
        "compared": table(
            ("method", *columns.values()),
            (
                (f"`{name}`", *(getattr(about, field) for field in columns))
                for name, about in methods.items()
            ),
        ),
        "wrappers": table(
            ("`hierfl.methods.`", "what it adds"),
            ((f"`{name}{about.call}`", about.adds) for name, about in wrappers.items()),
        ),
        "crossing": table(
            ("method", "down", "up", "kept"),
            ((f"`{name}`", about.down, about.up, about.kept) for name, about in methods.items()),
        ),
    }


def with_tables(text: str) -> str:
    """Return a page with its tables up to date."""
    found = tables()
    return BLOCK.sub(lambda block: f"{block[1]}{found[block[2]]}\n{block[3]}", text)


def outdated() -> list[Path]:
    """Return the pages whose tables are not those of the code."""
    pages = [DOCS / page for page in PAGES]
    return [page for page in pages if with_tables(page.read_text()) != page.read_text()]


def main(args: Sequence[str] | None = None) -> None:
    """Print the pages whose tables are outdated, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring the pages up to date")
    asked = parser.parse_args(args)
    for page in outdated():
        if asked.write:
            page.write_text(with_tables(page.read_text()))
        print(page)


if __name__ == "__main__":
    main()
