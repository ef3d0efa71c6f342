"""Clients' log likelihoods by their derivatives up to the fourth: no row is read for another value.

About a center c, with y = (1, v - c) and a symmetric tensor T of V + 1 numbers in each direction,

    log p(y_k | v) ~ T[y, y, y, y],    v ~ Normal:  E T[y, y, y, y] = T[m, m, m, m] + 6 T[m, m, S] + 3 T[S, S]

with m and S the mean and covariance of y. A client keeps what is distinct in T, one coefficient for
each product of at most four entries of v - c. The error falls as N^-3/2 in the number of rows N.
"""

from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import inverse
from hierfl.core.process import CPU
from hierfl.summaries.packed_rows import Expected

AT_ONCE = 1 << 20  # scalars of products carried at once


class Monomials(NamedTuple):
    """The products of four entries of y, of V + 1, and where they stand in matrices."""

    tuples: tuple[tuple[int, ...], ...]  # P, ascending within and among them
    pairs: tuple[Tensor, Tensor]  # (M,) both: the products of two entries
    halves: Tensor  # (M M,) of each product of two pairs which tuple it stands for, P: none
    every: Tensor  # ((V + 1)^4,) which tuple an entry of T belongs to
    equal: Tensor  # (P,) how many entries of T are equal
    highest: Tensor  # (P,) bool, of degree 4 in v


@lru_cache(maxsize=16)  # on the CPU, wherever clients work
def monomials(size: int) -> Monomials:
    """Return the monomials of V = `size` numbers."""
    entries = range(size + 1)
    tuples = tuple(combinations_with_replacement(entries, 4))
    place = {of: i for i, of in enumerate(tuples)}
    pairs = list(combinations_with_replacement(entries, 2))
    halves = [place.get((*a, *b), len(tuples)) for a in pairs for b in pairs]
    grid = torch.cartesian_prod(*[torch.arange(size + 1, device=CPU)] * 4).sort(1).values
    every = torch.tensor([place[tuple(of)] for of in grid.tolist()], device=CPU)
    first, second = torch.tensor(pairs, device=CPU).unbind(1)
    equal = [24 // prod(map(factorial, Counter(of).values())) for of in tuples]
    highest = torch.tensor([of[0] > 0 for of in tuples], device=CPU)
    at, times = torch.tensor(halves, device=CPU), torch.tensor(equal, device=CPU)
    return Monomials(tuples, (first, second), at, every, times, highest)


class Quartic(NamedTuple):
    """Polynomials of C clients; they stand in the place of `PackedRows`."""

    center: Tensor  # (C, V)
    terms: Tensor  # (C, P)

    @property
    def clients(self) -> int:
        """C."""
        return len(self.center)

    def some(self, who: Tensor) -> "Quartic":
        """Return the polynomials of the clients at some positions."""
        return Quartic(self.center[who], self.terms[who])

    def blocks(self) -> tuple[Tensor, ...]:
        """Return positions of clients that are carried at once."""
        return (torch.arange(self.clients),)

    def draws_at_once(self, points: int = 1) -> int:
        """Return how many draws of so many points are carried at once."""
        products = len(monomials(self.center.shape[1]).pairs[0])
        return max(1, AT_ONCE // (self.clients * products * points))

    def values(self, at: Tensor) -> Tensor:
        """Return log p(y | v), (C, T), at v (C, T, V)."""
        plan = monomials(self.center.shape[1])
        padded = torch.cat([self.terms, self.terms.new_zeros(self.clients, 1)], 1)
        products = len(plan.pairs[0])
        matrix = padded[:, plan.halves].view(-1, products, products)
        return torch.cat(
            [self._values(part, matrix) for part in at.split(self.draws_at_once(), 1)], 1
        )

    def _values(self, at: Tensor, matrix: Tensor) -> Tensor:
        first, second = monomials(self.center.shape[1]).pairs
        away = at - self.center[:, None]
        y = torch.cat([torch.ones_like(away[..., :1]), away], -1)
        pairs = y[..., first] * y[..., second]
        return ((pairs @ matrix) * pairs).sum(-1)

    def expected(self, mean: Tensor, precision: Tensor, nodes: object = None) -> Expected:
        """Return expectations under Normal(mean, precision^-1), in closed form."""
        return self._expected(mean, inverse(precision)[0])

    def at_mean(self, mean: Tensor, precision: Tensor) -> Expected:
        """Return value and derivatives at `mean` alone."""
        return self._expected(mean, precision.new_zeros(()))

    def _expected(self, mean: Tensor, within: Tensor) -> Expected:
        plan, size = monomials(self.center.shape[1]), self.center.shape[1] + 1
        tensor = (self.terms / plan.equal.to(self.terms))[:, plan.every].view(
            -1, size * size, size * size
        )
        away = mean - self.center
        m = torch.cat([torch.ones_like(away[:, :1]), away], 1)
        covariance = torch.zeros(self.clients, size, size, dtype=m.dtype)
        covariance[:, 1:, 1:] = within
        sides = torch.stack([(m[:, :, None] * m[:, None]).flatten(1), covariance.flatten(1)], 2)
        at, spread = (tensor @ sides).view(-1, size, size, 2).unbind(-1)
        along, spreading = (at @ m[..., None])[..., 0], (spread @ m[..., None])[..., 0]
        value = ((along + 6.0 * spreading) * m).sum(1) + 3.0 * (spread * covariance).sum((1, 2))
        slope, curvature = 4.0 * (along + 3.0 * spreading), -12.0 * (at + spread)
        return Expected(value, slope[:, 1:], curvature[:, 1:, 1:])

    def highest(self) -> "Quartic":
        """Return the terms of degree 4 alone."""
        is_highest = monomials(self.center.shape[1]).highest.to(self.terms)
        return self._replace(terms=self.terms * is_highest)
