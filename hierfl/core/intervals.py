"""The probability of an interval, and what follows from it."""

import math
from numbers import Real

from hierfl.core.arguments import expect_count

PROB = 0.9  # of the posterior in an interval
LEAST_DRAWS = 20


def check_prob(prob: object) -> float:
    """Refuse what is no probability of an interval."""
    if not isinstance(prob, Real) or isinstance(prob, bool) or not 0.0 < float(prob) < 1.0:
        raise ValueError(
            f"prob is {prob!r}: give the probability of the interval, between 0 and 1, such as 0.95"
        )
    return float(prob)


def tails(prob: float) -> list[float]:
    """Return the probabilities of the ends of a central interval."""
    return [round(0.5 - prob / 2.0, 12), round(0.5 + prob / 2.0, 12)]


def percent(prob: float) -> str:
    """Return a probability in words, "95%"."""
    return f"{100.0 * prob:.10g}%"


def least_draws(prob: float) -> int:
    """Return the draws that an interval needs: one in each tail, and 20 at least."""
    return max(LEAST_DRAWS, math.ceil(round(2.0 / (1.0 - prob), 9)))


def check_draws(draws: int, prob: float) -> None:
    """Refuse fewer draws than an interval needs."""
    if expect_count(draws, "draws") < (least := least_draws(prob)):
        raise ValueError(f"draws is {draws}: a {percent(prob)} interval needs {least} or more")
