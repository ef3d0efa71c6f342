"""A report on a fit, as one HTML page: what was run, what was found, and every reason to distrust it."""

from hierfl.report.page import Report, write

__all__ = ["Report", "write"]
