"""Chains that run until they mix, in the coordinates in which they mix sooner.

Clients' scalars are standardized by their factors first. Where that does not do, chains run on the
program's own scalars from the states reached: what is kept are the coordinates that give more
effective draws by counted work. Further iterations are added to those before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hierfl.core.chains import Mode, Sampled, Whitening, sampled, thinned, whitening_of
from hierfl.core.draw_quality import END_OFF_BY_CHANCE, quality_of
from hierfl.methods.stages.joint import Joint, Standard, flat

WARM = 60  # iterations of the warm-up
LEAST, MOST = 60, 480  # iterations after it, at first, and at most where R-hat asks for more
# iterations, up to which chains that have not mixed are adapted again, and begin again
RENEWED = 120
MIXED = 1.05  # split R-hat above which chains run on, twice as long
STUCK, GAIN = 0.2, 0.8  # an excess of R-hat over 1 that has to fall by this factor for it
SURE = 0.05  # Monte Carlo error of a scalar's sd, relative to it, above which they run on
AGAIN = 1.2  # times the iterations that are said to be missing, which run
# times the most iterations: chains that need more end unmixed, or with twice that error
HOPELESS = 4.0
NEARLY = 2.0  # times what R-hat may exceed 1 by, up to which chains run on as they are
CHEAP = 8.0  # seconds of counted work, up to which chains run on whatever R-hat does
HELD = 0.25  # what effective draws are worth where a chain is held, which begins again
DENSE = 100  # scalars that are whitened by a matrix in the program's own coordinates

# told about how many seconds are left: if the chains mix at once, and if they run on to the end
Said = Callable[[float, float], None]


@dataclass(eq=False)
class ChainCoordinates:
    """Where chains run: a density, its standardization, and how they are sampled there."""

    joint: Joint
    standard: Standard
    seed: int
    draws: int
    said: Said
    jumps: bool = True
    modes: tuple[Mode, ...] = ()  # that jumps are between

    @cached_property
    def seconds(self) -> float:
        """What a gradient takes, by its counted work."""
        x = torch.zeros(self.joint.count, self.joint.size)
        return self.joint.gradient.seconds(x, *flat(self.standard))

    def sampled(
        self,
        start: Tensor,
        whitening: Whitening,
        warmup: int,
        least: int,
        before: Sampled | None = None,
        needed: float = 0.0,
        on_trial: bool = False,
        were_held: bool = False,
    ) -> Sampled:
        """Return draws of all chains, after a warm-up or after draws before; `needed` are said to mix."""
        done = 0 if before is None else len(before.steps)

        def density(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.joint.at(x, self.standard)

        def judged(x: Tensor) -> Tensor:
            return torch.cat(
                [self.joint.z_of(x, self.standard), self.joint.own_scalars(x, self.standard)], 1
            )

        def warmed(leaps: float) -> None:
            iteration = leaps * self.seconds
            most = max(least, MOST - done)
            self.said(iteration * min(most, max(least, needed - done)), iteration * most)

        return sampled(
            density,
            start,
            whitening,
            draws=self.draws,
            warmup=warmup,
            least=least,
            seed=self.seed + done,
            jumps=self.jumps,
            judged=judged,
            before=before,
            warmed=warmed,
            on_trial=on_trial,
            were_held=were_held,
            modes=self.modes,
        )

    def is_cheap(self, drawn: Sampled) -> bool:
        """Return whether so many iterations take little counted work."""
        return len(drawn.steps) * drawn.leaps * self.seconds < CHEAP

    def needed(self, drawn: Sampled) -> float:
        """Return about how many iterations chains need to mix, and to know sds and tails of values well.

        What R-hat is above 1 falls as 1/n, as does the square of a Monte Carlo error.
        """
        values = self.joint.values_of(drawn.draws, self.standard)
        share = min(1.0, drawn.effective / len(values))
        ends = quality_of(values, torch.zeros(len(values)), share).end_error.nan_to_num(posinf=0.0)
        of_end = max((ends / END_OFF_BY_CHANCE).tolist(), default=0.0)
        return len(drawn.steps) * max(_excess(drawn), (drawn.spread[1] / SURE) ** 2, of_end**2)

    def worth(self, drawn: Sampled) -> float:
        """Return how many effective draws a second of counted work gives, a part where a chain is held."""
        share = HELD if math.isinf(drawn.r_hat) else 1.0
        return share * drawn.effective / (len(drawn.steps) * drawn.leaps * self.seconds)


def _excess(drawn: Sampled) -> float:
    """Return by how much R-hat, also of squares, exceeds 1, in what it may."""
    return (max(drawn.r_hat, drawn.spread[0]) - 1.0) / (MIXED - 1.0)


# a start in new coordinates: points (C, K + N E) and their whitening; None: there are none
NewCoordinates = tuple[ChainCoordinates, Tensor, Whitening]
Renewal = Callable[[ChainCoordinates, Sampled], NewCoordinates | None]


def until_mixed(
    first: ChainCoordinates, others: Sequence[Renewal], start: Tensor, whitening: Whitening
) -> tuple[ChainCoordinates, Sampled]:
    """Return draws of chains that have mixed, or do not mix, and the coordinates they ran in.

    Where the first ones need more iterations than a trial takes, `others` are tried.
    """
    here, before, held = first, math.inf, False
    drawn = first.sampled(start, whitening, WARM, LEAST, on_trial=first.joint.has_own)
    for coordinates in others:
        left = here.needed(drawn) - len(drawn.steps)
        new = None if left <= WARM + LEAST else coordinates(here, drawn)
        if new is None:
            continue
        tried = new[0].sampled(*new[1:], WARM, LEAST, on_trial=True)
        if new[0].worth(tried) > here.worth(drawn):
            here, drawn = new[0], tried
    while (still := here.needed(drawn)) > len(drawn.steps):
        done, excess = len(drawn.steps), drawn.r_hat - 1.0
        # where a chain is held for the first time, shorter steps are tried at least once
        if done >= MOST and not here.is_cheap(drawn) and (held or math.isfinite(excess)):
            break
        # chains that hold are renewed
        again = math.isinf(excess) and not math.isinf(before)
        is_nearly_mixed = _excess(drawn) <= NEARLY
        is_stuck = excess >= max(STUCK, GAIN * before) or still > HOPELESS * MOST
        if done > LEAST and is_stuck and not again and not here.is_cheap(drawn):
            break
        before, held = excess, held or math.isinf(excess)
        if (done < RENEWED and here is first and not is_nearly_mixed) or math.isinf(excess):
            at, to, old = thinned(drawn.draws, here.joint.count), min(2 * done, MOST), None
        else:
            # as many as they are said to need, at most twice those there are
            at, to, old = drawn.steps[-1], math.ceil(min(done, AGAIN * (still - done))), drawn
        warmup = WARM // 2 if old is None else 0
        drawn = here.sampled(at, drawn.whitening, warmup, to, old, still, were_held=held)
    return here, drawn


def moved(
    here: ChainCoordinates, drawn: Sampled, plain: ChainCoordinates
) -> tuple[Tensor, Whitening]:
    """Return where chains start in the program's own coordinates, and their whitening, by draws."""
    own = here.joint.own_scalars(drawn.draws, here.standard)
    x = plain.joint.from_own(here.joint.z_of(drawn.draws, here.standard), own)
    size = len(x.mT) if len(x.mT) <= DENSE else plain.joint.shared
    return thinned(x, plain.joint.count), whitening_of(x, size)
