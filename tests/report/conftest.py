"""The report that the tests of this room look at."""

import pytest

from hierfl.report import Report


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Write a report of a fit with all that it may be given, once for each process."""
    from tests.report.test_report import written_to

    return written_to(tmp_path_factory.mktemp("report") / "report.html")
