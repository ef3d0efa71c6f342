"""Every promise on the privacy page names a test or an attack that exists."""

import re
from pathlib import Path

from benchmarks.attacks.__main__ import ATTACKS
from hierfl.nodes import Policy

ROOT = Path(__file__).parents[2]


def known_tests() -> set[str]:
    """Return the names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


def test_each_promise_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "privacy.md").read_text()
    table = page.partition("## Promises")[2].partition("## What is not promised")[0]
    promises = [line for line in table.splitlines() if re.match(r"\| (?!promise \|)", line)]
    known = known_tests() | set(ATTACKS)
    assert 20 <= len(promises) <= 25
    for line in promises:
        promise, against, tests, not_against = (
            cell.strip() for cell in line.strip("| ").split(" | ")
        )
        shown = re.findall(r"`(\w+)`", tests)
        assert shown and set(shown) <= known, line
        assert promise and against and not_against


def test_each_test_that_a_page_names_exists() -> None:
    known = known_tests()
    for page in (ROOT / "docs").rglob("*.md"):
        named = re.findall(r"`(test_\w+)`", page.read_text())
        assert set(named) <= known, (page.name, sorted(set(named) - known))


def test_each_file_that_the_pages_name_exists() -> None:
    pages = [ROOT / "docs" / f"{page}.md" for page in ("privacy", "operators")]
    for page in (*pages, *(ROOT / "docs").glob("node*.md")):
        text = page.read_text()
        for name in re.findall(r"`((?:tests|benchmarks|examples)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page, name)


def test_the_threat_model_states_the_default_policy() -> None:
    default, page = Policy(), (ROOT / "docs" / "threat_model.md").read_text()
    said = page.partition("## The defaults")[2].partition("## What a curious server learns")[0]
    memory, size = default.memory_a_request >> 30, default.bytes_a_request >> 20
    limits = f"{default.seconds_a_request} s, {memory} GiB of memory, {size} MiB in size and"
    for part in (limits, f"{default.steps_a_round:,} local steps", "five rows"):
        assert part in " ".join(said.split())
    assert default.min_count == 5 and default.methods is None and default.budget is None
    assert not default.may_leave
