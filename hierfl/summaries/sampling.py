"""Draws of the surrogate posterior: chains over s, then m given s."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core import noise
from hierfl.summaries.chains import Sampled, Whitening, laplace, sampled
from hierfl.summaries.hierarchy import Factors
from hierfl.summaries.stretched import Stretch, stretch
from hierfl.summaries.surrogate import Surrogate

# chains by the cost of a gradient, N (D + 1)^3: a cheap iteration takes as long for many as for one
CHAINS = ((2e4, 128), (1e6, 32), (float("inf"), 8))
# split R-hat above which chains run again: of draws used for moments alone, and of those that are
# kept
MIXED, MIXED_WELL = 1.1, 1.05
COLD, WARM = 60, 20  # iterations of the warm-up, from the prior and from earlier draws
# iterations after it, at first, and at most where R-hat asks for longer chains
LEAST, MOST = 50, 400


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: chains amplify rounding, which depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Draws(NamedTuple):
    """Draws of the surrogate.

    draws: (S, K + N M), of z and, where there are some, of all mixing numbers.
    r_hat: the largest split R-hat of the chains.
    loc: (X,), tril: (X, X): whitening of the X coordinates that are sampled, for the next time.
    """

    draws: Tensor
    r_hat: float
    loc: Tensor
    tril: Tensor


def sample(
    surrogate: Surrogate,
    factors: Factors,
    count: int,
    *,
    around: tuple[Tensor, Tensor],
    known: Tensor | None,
    final: bool,
    seed: int,
) -> Draws:
    """Sample the surrogate posterior.

    Args:
        surrogate: of the program.
        factors: of the clients.
        count: S.
        around: mean and lower triangular scale of the sampled coordinates, a first guess.
        known: (S, K + N M) draws of a similar posterior to start from; None: start from the guess.
        final: the draws are kept, not only their moments: chains run longer and must mix better.
        seed: of the noise.
    """
    hierarchy = surrogate.hierarchy
    g = torch.Generator().manual_seed(noise.word(f"two_stage {seed}") & 0x7FFFFFFF)
    normal = torch.randn(count, len(hierarchy.inside), generator=g)
    if not len(surrogate.even):
        scales, r_hat = torch.zeros(count, 0), 1.0
        loc, tril = around
    else:
        found = _chains(surrogate, factors, count, around, known, final, seed, g)
        scales, r_hat = surrogate.from_signed(found.draws), found.r_hat
        loc, tril = found.whitening
    return Draws(surrogate.with_means(scales, normal, factors), r_hat, loc, tril)


def _chains(
    surrogate: Surrogate,
    factors: Factors,
    count: int,
    around: tuple[Tensor, Tensor],
    known: Tensor | None,
    final: bool,
    seed: int,
    g: torch.Generator,
) -> Sampled:
    cost = len(factors.shift) * (surrogate.hierarchy.reading.own_size + 1) ** 3
    chains = next(many for most, many in CHAINS if cost <= most)
    density = surrogate.density(factors, chains)
    whitening = Whitening(*around)
    if known is None:
        spread = whitening.tril.diagonal().clone()
        whitening = laplace(density, whitening.loc, chains, spread)
        away = torch.randn(chains, len(surrogate.even), generator=g)
        points = start = whitening.loc + away @ whitening.tril.mT
        warmup = COLD
    else:
        at = torch.randperm(len(known), generator=g)[:chains]
        points = surrogate.sampled(known)
        start, warmup = points[at], WARM
    scales = stretch(points, surrogate.even)
    start, whitening = scales.to_u(start), scales.whitening_in_u(whitening)
    least = 2 * LEAST if final else LEAST
    while True:
        found = sampled(
            scales.density(density),
            start,
            whitening,
            draws=count,
            warmup=warmup,
            least=least,
            seed=seed,
            even=surrogate.even,
            dense=len(surrogate.hierarchy.outside),
        )
        if not found.r_hat > (MIXED_WELL if final else MIXED):
            return _of_x(found, scales)
        if least >= MOST:
            warnings.warn(
                f"the server's chains have not mixed (split R-hat {found.r_hat:.2f}): do not "
                "trust spreads; a prior that keeps scales away from infinity helps",
                stacklevel=2,
            )
            return _of_x(found, scales)
        # of fewer draws than chains, some chains start together
        last = torch.arange(-chains, 0).clamp(min=-count)
        start, whitening, warmup, least = found.draws[last], found.whitening, WARM, 2 * least


def _of_x(found: Sampled, scales: Stretch) -> Sampled:
    whitening = scales.whitening_in_x(found.whitening)
    return Sampled(scales.from_u(found.draws), found.r_hat, whitening)
