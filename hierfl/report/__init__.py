"""A fit told on one page: what was run, what came of it, and every reason that was found not to trust it."""

from hierfl.report.blocks import Check
from hierfl.report.page import Report, write

__all__ = ["Check", "Report", "write"]
