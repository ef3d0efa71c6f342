"""Coordinates in which numbers of Normal sites have one scale, whatever the sites are that scale them.

Rows that see a product, as of sigma and e with e ~ Normal(0, 1), tie e to 1 / sigma: a ridge that
trajectories cannot follow. Others' sds grow with a noise's scale. About the mode at s = mode of the other
sites, the rows' part R of the precision of numbers e grows with s, of a diagonal D(s) = e^l(s):

    P(s) = prior + D R D,    e = path(s) + P(s)^(-1/2) P(mode)^(1/2) (x - mode).

Where rows decide e, x is centered; where the prior does, it is as in the program; between, each is as
it is best, as in Gorinova, Moore and Hoffman 2020, arXiv:1906.03028. The path is the mode of e given
s: of products P(s)^-1 D P(mode) mode, and what that leaves of its slope is taken as a line. Global
numbers have a matrix R, the others being integrated; of clients' numbers, of many global ones and beside
many scales R is a diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hierfl.core.gaussians import least_squares_solution
from hierfl.methods.stages.modes import Slopes, bends

MOST = 30.0  # of a growth, smoothly: numbers stay finite
# global numbers of which there is a matrix, at most, and others beside them
TOGETHER, SCALES = 64, 6
PASSES = 2
REACH = 2.0  # sds of s, up to which modes drift with it
LEAST_MOVE = 0.2  # of s, whose scalars are mostly logs of scales; else its sd
POINTS = 2000  # at which slopes are computed for the growth, at most
CHANGE = 0.1  # of a growth over a move, from which it counts
SHARE, LEAST = 0.02, 1e-6  # of the rows in a precision, from which they count; the least


class Together(NamedTuple):
    """Numbers whose precision is a matrix."""

    places: Tensor  # (A,) int64
    mode: Tensor  # (A,)
    prior: Tensor  # (A,)
    rows: Tensor  # (A, A), R
    pull: Tensor  # (A,), P(mode) times the mode of products

    def roots(self, growth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower roots of P(mode), (A, A), and of P(s) at l(s), (S, A, A)."""
        d = growth.exp()
        now = d[:, :, None] * self.rows * d[:, None] + self.prior.diag()
        root: Tensor = torch.linalg.cholesky_ex(self.prior.diag() + self.rows).L
        return root, torch.linalg.cholesky_ex(now).L

    def path(self, growth: Tensor, roots: tuple[Tensor, Tensor]) -> Tensor:
        """Return the modes (S, A) at l(s), (S, A)."""
        pull = growth.exp() * self.pull
        at, now = (
            torch.cholesky_solve(v[..., None], root)[..., 0]
            for v, root in zip((self.pull, pull), roots, strict=True)
        )
        return self.mode + now - at

    def at(self, x: Tensor, growth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers (S, A), and by how much the log of volume grows, (S,)."""
        first, now = roots = self.roots(growth)
        turned = (x - self.mode) @ first
        moved = torch.linalg.solve_triangular(now.mT, turned[..., None], upper=True)[..., 0]
        change = first.diagonal().log() - now.diagonal(dim1=1, dim2=2).log()
        return self.path(growth, roots) + moved, change.sum(1)

    def back(self, numbers: Tensor, growth: Tensor) -> Tensor:
        """Return x (S, A) at the numbers (S, A)."""
        first, now = roots = self.roots(growth)
        turned = (now.mT @ (numbers - self.path(growth, roots))[..., None])[..., 0]
        return self.mode + torch.linalg.solve_triangular(first.mT, turned.mT, upper=True).mT


class Centering(NamedTuple):
    """How the leading K numbers move with those of other sites among them; K is 0 if none does."""

    mode: Tensor  # (K,)
    share: Tensor  # (K,), of R in P, of numbers alone
    growth: Tensor  # (K, K), l by s
    bend: Tensor  # (K, K), and by half its square
    product: Tensor  # (K,): 1 where the mode of a number alone is that of a product
    drift: Tensor  # (K, K), of the mode beside
    reach: Tensor  # (K,), of what s drifts by: far away, where rows say nothing, modes stay
    together: Together

    def at(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the numbers (S, K...) at x (S, K...), and by how much the log of volume grows, (S,)."""
        if not len(self.mode):
            return x, 0.0
        leading, others = x.tensor_split([len(self.mode)], 1)
        growth, near = self._by(leading)
        path, log_scale = self._alone(growth)
        moved, volume = path + (leading - self.mode) * log_scale.exp(), log_scale.sum(1)
        if len(at := self.together.places):
            some, change = self.together.at(leading[:, at], growth[:, at])
            moved, volume = moved.index_copy(1, at, some), volume + change
        return torch.cat([moved + near, others], 1), volume

    def back(self, numbers: Tensor) -> Tensor:
        """Return x (S, K...) at numbers (S, K...)."""
        if not len(self.mode):
            return numbers
        leading, others = numbers.tensor_split([len(self.mode)], 1)
        growth, near = self._by(leading)
        path, log_scale = self._alone(growth)
        leading = leading - near
        x = self.mode + (leading - path) * (-log_scale).exp()
        if len(at := self.together.places):
            x = x.index_copy(1, at, self.together.back(leading[:, at], growth[:, at]))
        return torch.cat([x, others], 1)

    def _by(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return l(s) (S, K), and what modes drift beside, by x that has s."""
        away = x - self.mode
        growth = away @ self.growth.mT + 0.5 * away.square() @ self.bend.mT
        near = self.reach * (away / self.reach).tanh()
        return MOST * (growth / MOST).tanh(), near @ self.drift.mT

    def _alone(self, growth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the modes given s (S, K), and logs of scales (S, K), of numbers alone."""
        log_scale = -0.5 * (self.share * (2.0 * growth).expm1()).log1p()
        of_product = self.product * self.mode * (growth + 2.0 * log_scale).expm1()
        return self.mode + of_product, log_scale


def uncentered() -> Centering:
    """Return the coordinates of numbers as they are."""
    none = torch.zeros(0)
    square = none[:, None]
    together = Together(none.long(), none, none, square, none)
    return Centering(none, none, square, square, none, square, none, together)


@dataclass(frozen=True, eq=False)
class ScaledPoint:
    """A point of K numbers, of which those inside, (P,), are of Normal sites, and others, (U,), scale them."""

    slopes: Slopes  # of the log density
    at: Tensor  # (K,)
    sd: Tensor  # (K,), of all numbers
    prior: Tensor  # (P,), precision of those inside
    inside: Tensor  # (P,) int64
    outside: Tensor  # (U,) int64
    shared: int  # how many of the first are global
    own: int  # how many of the others each client has

    def centering(self) -> Centering:
        """Return how numbers move about it."""
        pairs = len(self.inside) * len(self.outside)
        if not pairs or 4 * pairs > POINTS:
            return uncentered()
        here = bends(self.slopes, self.at, self.shared, self.own).matrix()[self.inside]
        own = here[:, self.inside]
        response = -least_squares_solution(own, here[:, self.outside])  # (P, U), of modes
        growth = bend = torch.zeros_like(response)
        centering = self._along(own, response, growth, bend)
        for _ in range(PASSES):  # first along a line, then along the path
            growth, bend = self._growth(own.diagonal(), centering)
            if not bool(growth.any()):
                return uncentered()
            centering = self._along(own, response, growth, bend)
        return centering

    @property
    def _has_few_scales(self) -> bool:
        """Whether scales are few; a horseshoe's have tails far beyond where a matrix and bends are right."""
        return len(self.outside) <= SCALES

    def _growth(self, own: Tensor, path: Centering) -> tuple[Tensor, Tensor]:
        """Return growths and bends (P, U) of what is of rows in precisions `own` (P,) along a path."""
        growths, bends = [], []
        for place in self.outside.tolist():
            away, move = torch.zeros_like(self.at), max(float(self.sd[place]), LEAST_MOVE)
            away[place] = move
            ends = path.at(torch.stack([self.at - away, self.at + away]))[0]
            there = [own, *(self._precisions(end) for end in ends)]
            of_rows = torch.stack(there) - self.prior
            is_seen = of_rows > SHARE * own.abs()
            is_seen = is_seen.any(0) if self._has_few_scales else is_seen.all(0)
            half, less, more = 0.5 * of_rows.clamp(min=LEAST * own.abs()).log()
            changes = is_seen & ((more - less).abs() > CHANGE)
            growths.append(torch.where(changes, more - less, 0.0) / (2.0 * move))
            # a sum of growths bends up, but far away nothing says that it goes on
            bent = (more + less - 2.0 * half).clamp(max=0.0) * self._has_few_scales
            bends.append(torch.where(changes, bent, 0.0) / move**2)
        return torch.stack(growths, 1), torch.stack(bends, 1)

    def _precisions(self, numbers: Tensor) -> Tensor:
        """Return the precisions (P,) of those inside, each given all others."""
        return bends(self.slopes, numbers, self.shared, self.own).diagonal()[self.inside]

    def _along(self, own: Tensor, response: Tensor, growth: Tensor, bend: Tensor) -> Centering:
        """Return the coordinates by a precision `own` (P, P), and of modes the path and what drifts beside."""
        mode, none, inside = self.at[self.inside], torch.zeros_like(self.at), self.inside
        is_joint = inside < self.shared
        is_joint &= self._has_few_scales and bool(growth[is_joint].any())
        is_joint &= int(is_joint.sum()) <= TOGETHER
        share = (1.0 - self.prior / own.diagonal()).nan_to_num().clamp(0.0, 1.0)
        share, some = torch.where(is_joint, 0.0, share), is_joint.nonzero()[:, 0]
        prior, by = self.prior[some], growth[some]
        rows = _rows_of(own, prior, some)
        precision = prior.diag() + rows

        def slopes(product: Tensor) -> Tensor:
            """Return slopes (P, U) of the modes of products."""
            slope = (mode * product * (1.0 - 2.0 * share))[:, None] * growth
            middle = (mode * product)[some]
            turn = by * (prior * middle)[:, None] - rows @ (by * middle[:, None])
            return slope.index_copy(0, some, torch.linalg.solve(precision, turn))

        rest = response - slopes(torch.ones_like(mode))
        product = (rest.square().sum(1) < response.square().sum(1)).to(mode)
        drift = response - slopes(product)
        square, cells = torch.zeros(len(none), len(none)), (inside[:, None], self.outside)
        return Centering(
            self.at,
            none.index_put((inside,), share),
            square.index_put(cells, growth),
            square.index_put(cells, bend),
            none.index_put((inside,), torch.where(is_joint, 0.0, product)),
            square.index_put(cells, drift),
            REACH * self.sd.clamp(min=LEAST_MOVE),
            Together(inside[some], mode[some], prior, rows, precision @ (mode * product)[some]),
        )


def _rows_of(own: Tensor, prior: Tensor, some: Tensor) -> Tensor:
    """Return the rows' part (A, A) of the precision of some numbers, the others (of P) being integrated."""
    covariance = least_squares_solution(own, torch.eye(len(own)))[some][:, some]
    precision = least_squares_solution(covariance, torch.eye(len(some)))
    values, vectors = torch.linalg.eigh(precision - prior.diag())
    return vectors * values.clamp(min=0.0) @ vectors.mT
