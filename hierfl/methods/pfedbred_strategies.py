"""Where pFedBreD's clients put the mean mu of their prior: one function each.

    none    mu = w                                             (pFedMe)
    lg      mu = w - a grad nll(w)
    meg     mu = w - m (last - v)                              last: the client's own w at the end of its last round
    mh      mu = w - a grad nll(w) - m (last - v)
    mh24    mu = w - a grad nll(w - a grad nll(w)) - m (last - v)
    mh-code mh24 with a mini-batch for each gradient, and w itself takes the first of its two steps

Source: Shi et al. 2023, arXiv:2310.09183, Eq. (14), and Eq. (24) for mh24; mh-code is what the
authors' code does under the name mh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hierfl.program.program import Params

Word = Literal["none", "lg", "meg", "mh", "mh24", "mh-code"]


class Place(NamedTuple):
    """What a strategy puts mu by; all params are those of the local sites.

    Args:
        w: the client's copy of the global params.
        ahead: params -> w - a grad nll(params), on the first of two mini-batches.
        descended: params -> w - a grad nll(params), on the second; on one mini-batch the two are
            the same.
        remembered: params -> params - m (last - v).
    """

    w: Params
    ahead: Callable[[Params], Params]
    descended: Callable[[Params], Params]
    remembered: Callable[[Params], Params]


class Put(NamedTuple):
    """Mu, and w as far as its gradient step alone has moved it."""

    mu: Params
    near: Params


def none(at: Place) -> Put:
    """Return mu = w."""
    return Put(at.w, at.w)


def lg(at: Place) -> Put:
    """Return mu after a gradient step."""
    near = at.descended(at.w)
    return Put(near, near)


def meg(at: Place) -> Put:
    """Return mu after a step of memory."""
    return Put(at.remembered(at.w), at.w)


def mh(at: Place) -> Put:
    """Return mu after a gradient step and a step of memory."""
    near = at.descended(at.w)
    return Put(at.remembered(near), near)


def mh24(at: Place) -> Put:
    """Return mu after a step by the gradient one step ahead, and a step of memory."""
    near = at.descended(at.ahead(at.w))
    return Put(at.remembered(near), near)


@dataclass(frozen=True)
class Strategy:
    """A way to put mu, and what it needs.

    Args:
        put: where mu is.
        remembers: whether clients keep their last w.
        moves_w: whether w itself takes the gradient step, on two mini-batches; then mu is no
            function of w, and has no Jacobian.
    """

    put: Callable[[Place], Put]
    remembers: bool = False
    moves_w: bool = False


mh_code = Strategy(mh24, remembers=True, moves_w=True)

STRATEGIES: dict[str, Strategy] = {
    "none": Strategy(none),
    "lg": Strategy(lg),
    "meg": Strategy(meg, remembers=True),
    "mh": Strategy(mh, remembers=True),
    "mh24": Strategy(mh24, remembers=True),
    "mh-code": mh_code,
}


def strategy_of(word: Word | Strategy) -> Strategy:
    """Return the strategy that a word stands for.

    Raises:
        ValueError: `word` stands for none.
    """
    if isinstance(word, Strategy):
        return word
    if word not in STRATEGIES:
        raise ValueError(f"strategy is {word!r}: it must be one of {', '.join(STRATEGIES)}")
    return STRATEGIES[word]
