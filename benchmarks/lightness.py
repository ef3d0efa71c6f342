"""Lines, raises and vague names of the package: `python -m benchmarks.lightness`."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
PRODUCT, TESTS = ("hierfl", "models", "guides"), ("tests",)
# words that could name anything
VAGUE = frozenset(
    "found one each parts known given odd rest wanted asked told these those both named left most "
    "few more apart kept said".split()
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Counts(NamedTuple):
    """What is counted in a file; `code` leaves out blank lines, comments and docstrings."""

    lines: int
    code: int
    raises: int
    bindings: int
    vague: int


def files(*rooms: str) -> Iterator[Path]:
    """Yield the Python files of rooms; links to them are not followed."""
    for room in rooms:
        yield from (p for p in sorted((ROOT / room).rglob("*.py")) if p.resolve() == p)


def counts(text: str) -> Counts:
    """Count a file's lines, raises, and names that it binds."""
    nodes, rows = list(ast.walk(ast.parse(text))), text.splitlines()
    quoted = set()
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            quoted |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [n.arg for n in nodes if isinstance(n, ast.arg)]
    code = sum(
        bool(row.strip()) and not row.strip().startswith("#") and line not in quoted
        for line, row in enumerate(rows, 1)
    )
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    return Counts(len(rows), code, raises, len(names), sum(name in VAGUE for name in names))


def table() -> pd.DataFrame:
    """Return the counts of each room of the product, of all of it, and of the tests."""
    rooms = {"product": PRODUCT, "tests": TESTS}
    rooms |= {str(p.relative_to(ROOT)): (str(p),) for p in sorted((ROOT / "hierfl").iterdir())}
    made = {}
    for name, paths in rooms.items():
        own = [counts(path.read_text()) for path in files(*paths)]
        if own:
            made[name] = Counts(*map(sum, zip(*own, strict=True)))
    frame = pd.DataFrame.from_dict(made, orient="index", columns=Counts._fields)
    frame["raises per 1,000"] = (1000 * frame.raises / frame.code).round(1)
    frame["vague, %"] = (100 * frame.vague / frame.bindings).round(1)
    return frame.drop(columns=["raises", "bindings", "vague"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print(table().to_string())


if __name__ == "__main__":
    main()
