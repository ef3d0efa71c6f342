"""A check of a fit, and numbers and lists of names as words of its answer."""

import math
from collections.abc import Sequence
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


MINUS = "\N{MINUS SIGN}"


def number(value: float, digits: int = 3) -> str:
    """Format a number: significant digits, a true minus sign, no exponent below 1e7.

    >>> number(1234.5), number(0.012345), number(12.0), number(float("nan"))
    ('1234', '0.0123', '12.0', 'none')
    """
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "infinite"
    if value == 0.0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if -5 < size < 7:
        return f"{value:.{max(0, digits - 1 - size)}f}".replace("-", MINUS)
    return f"{value:.{digits - 1}e}".replace("-", MINUS)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join names into a phrase; beyond `most` names, give only how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
    ('a and b', 'a, b, c, d and 2 more')
    """
    shown = list(names[:most])
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def share(value: float) -> str:
    """Format a share as a whole percentage; only exactly 0 and 1 become "0%" and "100%".

    >>> share(0.254), share(0.001), share(0.999), share(1.0)
    ('25%', '< 1%', '> 99%', '100%')
    """
    if 0.0 < value < 0.01:
        return "< 1%"
    return "> 99%" if 0.99 < value < 1.0 else f"{100.0 * value:.0f}%"


# Every threshold by which a fit is judged, but for those that methods use as well: K_HAT, ALARM, OFF_BY_CHANCE.
# the guide beside its weighted draws
LEAST_EFFECTIVE = 100  # weighted draws: a standard deviation is then known to 7%
OFF = 0.2  # of a standard deviation: a guide that is farther off is not good
# relative error of the sd of a client's own scalar given the global ones, and of its mean, in sds
OWN_OFF, OWN_SHIFT = 0.1, 0.2
ERRORS = 1.0  # standard errors added to a ratio: a guide that may be off by more is not good

# the trend of the ELBO or loss
LEAST_ROUNDS = 40  # to estimate a trend; the second half of them is used
NATS = 1.0  # the rise of an ELBO that matters: a factor e in the evidence
SHARE = 0.01  # the relative change that matters in a loss of unknown units, or that noise may hide
FAR = 3.0  # standard errors that count as significant

# rounds
R_HAT = 1.05  # split R-hat of chains that have mixed is below this
ROUNDS_EACH = 5  # in which a client takes part on average, or all rounds of a shorter run
FALLEN = 0.01  # nats per row that a held-out score may lie below its best round
DOMINATED = 0.1  # effective clients, as a share of those that took part; and never below 1.5
LEAST_CLIENTS = 1.5

# clients
FEW_ROWS = 20  # with fewer rows, the score of a client is mostly noise
LITTLE = 0.1  # nats: the divergence of two Normals of equal sd that are 0.45 sd apart

# predictions
SURE = 0.01  # significance level: each test warns falsely in one report of a hundred
COVERAGE = 0.03  # by which the coverage of 90% intervals may be off
AUROC = 0.75  # of foreign rows against own rows
