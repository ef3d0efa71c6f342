"""A report on a fit: one HTML page with what was run, found and checked."""

from hierfl.report.page import Report

__all__ = ["Report"]
