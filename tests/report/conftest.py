"""The report that the tests of this room look at."""

import pytest
import torch

from hierfl.report import Report


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Write a report of a fit with all that it may be given, once for each process."""
    from tests.report.test_report import written_to

    torch.set_default_dtype(torch.float64)
    return written_to(tmp_path_factory.mktemp("report") / "report.html")
