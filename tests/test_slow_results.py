"""The table of slow tests: results are read from a JUnit report, and older rows are kept."""

from tests.slow_results import merged, rows_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_good" time="61.2"/>
<testcase classname="tests.a.test_b" name="test_bad[1]" time="2"><failure message="x"/></testcase>
<testcase classname="tests.a.test_b" name="test_left_out" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_rows_replace_older_rows_of_the_same_test_alone() -> None:
    rows = rows_of(REPORT, "2026-01-02", "abc")
    assert rows == {
        "a.test_b::test_good": "| a.test_b::test_good | passed | 61 | 2026-01-02 | abc |",
        "a.test_b::test_bad[1]": "| a.test_b::test_bad[1] | **failed** | 2 | 2026-01-02 | abc |",
    }
    old = {name: f"| {name} | passed | 1 | 2025-01-01 | old |" for name in ("z::other", *rows)}
    text = merged(merged("", old), rows)
    assert [line for line in text.splitlines() if "::" in line] == [
        rows["a.test_b::test_bad[1]"],
        rows["a.test_b::test_good"],
        old["z::other"],
    ]
