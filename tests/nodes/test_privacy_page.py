"""Every promise on the privacy page names a test or an attack that exists."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.attacks.__main__ import ATTACKS

ROOT = Path(__file__).parents[2]


def test_each_promise_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text()
    table = page.partition("## What a node promises")[2].partition("**What is not promised.**")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ")][1:]
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(promises) > 10
    for line in promises:
        shown = re.findall(r"`(\w+)`", line.rpartition("|")[0].rpartition("|")[2])
        assert shown and set(shown) <= tests | set(ATTACKS), line


def test_each_file_that_the_pages_name_exists() -> None:
    for page in ("privacy", "nodes", "operators"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for name in re.findall(r"`((?:tests|benchmarks|examples)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page, name)
