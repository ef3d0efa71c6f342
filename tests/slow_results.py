"""Write down the last result of each slow test: `python -m tests.slow_results junit.xml`.

`make test-slow` runs the slow tests and then this. The table in tests/SLOW.md has one row per test, with the
date and the commit at which it last ran. Tests that were not run this time keep their rows.
"""

import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "SLOW.md"
HEAD = """# Slow tests

`make test-slow` runs the tests that take more than 2 s each, and writes their results here. CI runs them weekly.

| test | result | seconds | date | commit |
|---|---|---|---|---|
"""


def rows_of(xml: str, date: str, commit: str) -> dict[str, str]:
    """Return a row of the table for each test of a JUnit report that ran."""
    rows = {}
    for case in ET.fromstring(xml).iter("testcase"):
        kinds = {child.tag for child in case}
        if "skipped" in kinds:
            continue
        name = f"{case.attrib['classname'].removeprefix('tests.')}::{case.attrib['name']}"
        result = "**failed**" if kinds & {"failure", "error"} else "passed"
        rows[name] = f"| {name} | {result} | {float(case.attrib['time']):.0f} | {date} | {commit} |"
    return rows


def merged(old: str, new: dict[str, str]) -> str:
    """Return the text of the table, with the new rows in place of older rows of the same tests."""
    kept = {line.split("|")[1].strip(): line for line in old.splitlines() if "::" in line}
    return HEAD + "".join(f"{row}\n" for _, row in sorted((kept | new).items()))


def main(report: str) -> None:
    """Update the table from a JUnit report."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    new = rows_of(
        Path(report).read_text(), f"{datetime.now(UTC):%Y-%m-%d}", commit.stdout.strip() or "?"
    )
    TABLE.write_text(merged(TABLE.read_text() if TABLE.exists() else "", new))
    print(f"{TABLE.relative_to(ROOT)}: {len(new)} tests")


if __name__ == "__main__":
    main(sys.argv[1])
