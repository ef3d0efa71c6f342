"""A check of a fit: a question, its answer, and what a warning says of the whole fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["fatal", "doubt", "note"]


@dataclass(frozen=True)
class Check:
    """A question about a fit and its answer.

    Args:
        question: what was checked.
        verdict: "good", "warning", or "not asked" if the question cannot be answered for this fit.
        answer: what was found, in sentences with the numbers and the fix.
        severity: of a warning. "fatal": the fit is not trustworthy. "doubt": whether it is cannot
            be told, which holds for a question that is not asked as well. "note": something else is
            to be known.
    """

    question: str
    verdict: Literal["good", "warning", "not asked"]
    answer: str
    severity: Severity = "note"


def answered(question: str, bad: bool, answer: str, severity: Severity = "note") -> Check:
    """Return a check with the verdict "warning" if `bad`, "good" otherwise."""
    return Check(question, "warning" if bad else "good", answer, severity)
