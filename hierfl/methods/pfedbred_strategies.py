"""Where pFedBreD's clients put the mean mu of their prior: one function each.

    none    mu = w                                             (pFedMe)
    lg      mu = w - a grad nll(w)
    meg     mu = w - m (last - v)              last: the client's own w at the end of its last round
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


def _strategy(gradients: int, *, memory: bool, moves_w: bool = False) -> Strategy:
    """Return the strategy of 0 to 2 gradients, the first of two one step ahead, and of memory."""

    def put(at: Place) -> Put:
        ahead = at.ahead(at.w) if gradients == 2 else at.w
        near = at.descended(ahead) if gradients else at.w
        return Put(at.remembered(near) if memory else near, near)

    return Strategy(put, remembers=memory, moves_w=moves_w)


STRATEGIES: dict[str, Strategy] = {
    "none": _strategy(0, memory=False),
    "lg": _strategy(1, memory=False),
    "meg": _strategy(0, memory=True),
    "mh": _strategy(1, memory=True),
    "mh24": _strategy(2, memory=True),
    "mh-code": _strategy(2, memory=True, moves_w=True),
}


def strategy_of(word: Word | Strategy) -> Strategy:
    """Return the strategy of a name, or raise a ValueError."""
    if isinstance(word, Strategy):
        return word
    if word not in STRATEGIES:
        raise ValueError(f"strategy is {word!r}: it must be one of {', '.join(STRATEGIES)}")
    return STRATEGIES[word]
