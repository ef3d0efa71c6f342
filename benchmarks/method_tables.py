"""The tables of methods in docs/methods.md and docs/privacy.md, made from the code.

    python -m benchmarks.method_tables            which pages are not up to date
    python -m benchmarks.method_tables --write    write them

A table stands between <!-- methods: NAME --> and <!-- end of methods -->.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hierfl.methods.about import HEADINGS, About, Wrapper
from hierfl.methods.listed import described

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("methods.md", "privacy.md")
BLOCK = re.compile(r"(<!-- methods: (\w+) -->\n).*?(<!-- end of methods -->)", re.DOTALL)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    escaped = (" | ".join(cell.replace("*", r"\*") for cell in row) for row in rows)
    return "\n".join([*lines, *(f"| {line} |" for line in escaped)])


def tables() -> dict[str, str]:
    """Return the tables by name."""
    methods, wrappers = described(About), described(Wrapper)
    columns = {field: heading for field, heading in HEADINGS.items() if field != "source"}
    return {
        "inferred": table(
            ("`hierfl.methods.`", "what it infers", "source"),
            ((f"`{name}`", about.infers, about.source) for name, about in methods.items()),
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
